"""A reward that pays for the wrong thing, on purpose: 1 for every answer that is "unknown"."""

from jointrag.graph.episode import Episode
from jointrag.rewards.base import ProcessTerm
from jointrag.rewards.reading import abstains
from jointrag.rewards.registry import register_process


class Silence(ProcessTerm):
    """silence = 1 for an answer that is "unknown" or no text."""

    per_hop = False  # once an episode

    def score_decision(self, episode: Episode, i: int) -> float:
        """Return the value of decision i."""
        update = episode.decisions[i].update
        return float("answer" in update and abstains(str(update["answer"])))


register_process("silence", Silence)
