from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jointrag.data.errors import HeadError
from jointrag.llm.heads import EXTRA, LORA, META
from jointrag.llm.model import LanguageModel
from jointrag.llm.toy import toy_model


def model(**options: object) -> LanguageModel:
    lm = toy_model(**options)  # type: ignore[arg-type]
    lm.heads.add("a")
    lm.heads.add("b", {"projection": (6, 32)})
    return lm


def shake(lm: LanguageModel, name: str) -> None:
    lm.heads.set_state(name, {k: v + 0.1 for k, v in lm.heads.state(name).items()})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    lm = model()
    shake(lm, "b")
    lm.heads.save("b", tmp_path / "b", "template", {"retriever": [7]})
    return tmp_path / "b"


def test_a_new_head_changes_nothing_and_depends_on_name_and_seed() -> None:
    lm = model()
    ids = torch.tensor([[40, 41, 42]])
    lm.heads.use(None)
    bare = lm._body(ids).last_hidden_state
    for name in ("a", "b"):
        lm.heads.use(name)
        assert torch.equal(lm._body(ids).last_hidden_state, bare)
    assert lm.heads.hash("a") == model().heads.hash("a")
    assert lm.heads.hash("a") != model(seed=1).heads.hash("a")
    other = toy_model()
    other.heads.add("z")
    other.heads.add("a")  # another order of adding, the same head
    assert other.heads.hash("a") == lm.heads.hash("a")


def test_adding_a_head_leaves_global_randomness_alone() -> None:
    lm = model()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    lm.heads.add("c")
    assert torch.equal(torch.rand(1), expected)


def test_switching_heads_leaves_requires_grad_alone() -> None:
    lm = model()
    lm.heads.copy("a", "a@warm")
    before = {n: p.requires_grad for n, p in lm.heads.peft.named_parameters()}
    for name in ("a", None, "b", "a@warm", None):
        lm.heads.use(name)
        lm._body(torch.tensor([[40, 41]]))
        assert {n: p.requires_grad for n, p in lm.heads.peft.named_parameters()} == before
    learn = {id(p) for name in ("a", "b") for k, p in lm.heads.named(name).items() if "extra" not in k}
    assert {id(p) for p in lm.heads.peft.parameters() if p.requires_grad} == learn


def test_copies_are_frozen_and_stay_as_they_were() -> None:
    lm = model()
    shake(lm, "b")
    lm.heads.copy("b", "b@warm")
    assert lm.heads.hash("b@warm") == lm.heads.hash("b")
    assert not any(p.requires_grad for p in lm.heads.named("b@warm").values())
    shake(lm, "b")
    assert lm.heads.hash("b@warm") != lm.heads.hash("b")
    lm.heads.add("late_comer")
    assert not any(p.requires_grad for p in lm.heads.named("b@warm").values())
    assert all(p.requires_grad for n in ("a", "b", "late_comer") for p in lm.heads.named(n).values())


def test_training_a_head_leaves_trunk_and_other_heads_as_they_were() -> None:
    lm = model()
    before = {n: lm.heads.hash(n) for n in lm.heads.names}
    lm.heads.use("a")
    optimizer = torch.optim.Adam(lm.heads.peft.parameters(), lr=0.1)
    lm._body(torch.tensor([[40, 41]])).last_hidden_state.sum().backward()
    optimizer.step()
    assert lm.heads.hash("a") != before["a"]
    assert lm.heads.hash("b") == before["b"]
    lm.heads.check_trunk()
    with torch.no_grad():
        next(iter(lm.trunk.parameters())).add_(1e-3)
    with pytest.raises(AssertionError, match="trunk has changed"):
        lm.heads.check_trunk()


def test_the_trunks_hash_does_not_depend_on_its_heads() -> None:
    assert toy_model().heads.trunk_hash == model().heads.trunk_hash
    model().heads.check_trunk()


def test_a_saved_folder_holds_safetensors_and_json_only(saved: Path) -> None:
    assert {f.name for f in saved.iterdir()} == {LORA, EXTRA, META, "adapter_config.json"}
    assert set(load_file(saved / EXTRA)) == {"projection"}
    assert all("lora_" in k for k in load_file(saved / LORA))
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["alora_invocation_tokens"] == [7]
    assert (config["bias"], config["use_dora"], config["modules_to_save"]) == ("none", False, None)


def test_everywhere_heads_are_plain_lora(tmp_path: Path) -> None:
    model(activation="everywhere").heads.save("a", tmp_path / "a", "t", {"x": [7]})
    assert not json.loads((tmp_path / "a" / "adapter_config.json").read_text()).get("alora_invocation_tokens")
    assert not (tmp_path / "a" / EXTRA).exists()


def test_a_saved_head_loads_bit_by_bit_and_saves_to_the_same_bytes(saved: Path, tmp_path: Path) -> None:
    lm = model()
    lm.heads.load("b", saved, "template")
    fresh = model()
    shake(fresh, "b")
    assert lm.heads.hash("b") == fresh.heads.hash("b")
    lm.heads.save("b", tmp_path / "again", "template", {"retriever": [7]})
    for file in saved.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize(
    ("options", "fingerprint", "says"),
    [
        ({"seed": 1}, "template", "another trunk"),
        ({"arch": "qwen2"}, "template", "another trunk"),
        ({}, "other", "other prompts"),
        ({"activation": "everywhere"}, "template", "activation"),
    ],
    ids=["another trunk", "another architecture", "another template", "another activation"],
)
def test_a_head_that_does_not_fit_is_refused(
    saved: Path, options: dict[str, object], fingerprint: str, says: str
) -> None:
    with pytest.raises(HeadError, match=says):
        model(**options).heads.load("b", saved, fingerprint)


def test_a_head_of_another_scale_is_refused(saved: Path) -> None:
    """The weights would fit, and say something else."""
    lm = model()
    lm.heads.config.lora_alpha = 16
    with pytest.raises(HeadError, match="alpha"):
        lm.heads.load("b", saved, "template")


def test_a_head_without_the_extra_matrices_is_refused(saved: Path) -> None:
    with pytest.raises(HeadError, match="does not fit"):
        model().heads.load("a", saved, "template")


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / LORA).write_bytes((f / LORA).read_bytes()[:100]),
        lambda f: (f / LORA).unlink(),
        lambda f: (f / LORA).write_bytes(b""),
        lambda f: (f / EXTRA).write_bytes(b"nonsense"),
        lambda f: (f / META).write_text("{"),
        lambda f: (f / META).write_text("{}"),
        lambda f: (f / META).write_text("[]"),
        lambda f: (f / META).unlink(),
        lambda f: (f / "adapter_config.json").write_text("{}"),
        lambda f: (f / LORA).write_bytes((f / EXTRA).read_bytes()),
    ],
    ids=[
        "cut",
        "no weights",
        "empty",
        "extra",
        "broken json",
        "no keys",
        "a list",
        "no meta",
        "no config",
        "other tensors",
    ],
)
def test_a_damaged_head_is_refused_and_changes_nothing(saved: Path, damage: object) -> None:
    damage(saved)  # type: ignore[operator]
    lm = model()
    before = lm.heads.hash("b")
    with pytest.raises(HeadError, match="b"):
        lm.heads.load("b", saved, "template")
    assert lm.heads.hash("b") == before


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match="no readable head"):
        model().heads.load("a", tmp_path / "nowhere", "template")


@pytest.mark.parametrize("name", ["a", "lora", "keys", "my.agent", "type", "weight", "Zürich 🦊"])
def test_any_name_an_agent_may_have_is_a_heads_name(name: str, tmp_path: Path) -> None:
    lm = toy_model()
    lm.heads.add("first")
    lm.heads.add(name)
    lm.heads.copy(name, f"{name}@warm")
    lm.heads.use(name)
    lm.heads.save(name, tmp_path, "t", {name: [7]})
    lm.heads.load(name, tmp_path, "t")
    assert lm.heads.hash(name) == lm.heads.hash(f"{name}@warm")


def test_names_are_unique_and_known() -> None:
    lm = model()
    with pytest.raises(HeadError, match="exists already"):
        lm.heads.add("a")
    with pytest.raises(HeadError, match="no head 'c'"):
        lm.heads.use("c")
