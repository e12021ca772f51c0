"""Words of the world: names, relations, passage wordings and the paraphrase banks questions are asked in.

A name is two words, so that near-name collisions are natural. Content words of questions never occur in passages.
"""

from __future__ import annotations

from dataclasses import dataclass

_ONSETS = "b d f g k l m n p r s t v z".split()
_VOWELS = "a e i o u".split()
_CODAS = "n r s l th k".split()


def _words(count: int, offset: int) -> tuple[str, ...]:
    """Return `count` distinct pronounceable words; different offsets give disjoint lists (offset < 5, by vowel)."""
    words = [
        (a + v + b + w + c).capitalize()
        for c in _CODAS
        for b in _ONSETS
        for a in _ONSETS
        for v, w in ((_VOWELS[offset], _VOWELS[(offset + 2) % 5]),)
        if a != b
    ]
    stride = len(words) // count
    return tuple(words[i * stride] for i in range(count))


GIVEN = _words(120, 0)  # people: given name, family name
FAMILY = _words(120, 1)
STEM = _words(160, 2)  # everything else: stem, kind word
KIND_WORDS = {
    "place": "Bay Ford Hill Port Vale Cross Moor Gate Field Wood Lake Cliff".split(),
    "work": "Song Letter Garden Winter River Mirror Tale Crown Lantern Voyage Secret Island".split(),
    "company": "Works Mills Lines Bank Press Foundry Trust Motors Textiles Mining Rail Glass".split(),
    "alias": "Fox Hawk Wolf Raven Lion Otter Badger Heron Lynx Crane Stag Owl".split(),
}
JOBS = "baker tailor smith sailor clerk nurse lawyer miner cook potter judge pilot".split()
YEARS = tuple(str(y) for y in range(1900, 2000))
RETRACTED = ("Withdrawn :", "Disproved :", "Retracted :")  # cue words of a twin
DATED = ("As of {year} :",)  # cue of a dated pair: the later year holds


@dataclass(frozen=True, slots=True)
class Relation:
    """`subject --name--> object`: told in passages of `group`, asked by `banks[b]`, found by `fragments[variant]`."""

    name: str
    group: str
    object: str  # entity type, or job, year, alias
    banks: tuple[str, ...]  # one noun per paraphrase bank; the last bank is held out
    fragments: tuple[str, ...]  # the words around the value in each wording of the passage


@dataclass(frozen=True, slots=True)
class Group:
    """The facts one passage tells: `wordings` hold one slot {0}, {1} per relation, in order."""

    name: str
    subject: str
    wordings: tuple[str, ...]


GROUPS = (
    Group("life", "person", (
        "First saw light in {0} and later settled in {1} .",
        "Grew up in {0} , then moved to {1} .",
        "Left {0} as a baby ; now a resident of {1} .",
    )),
    Group("school", "person", (
        "Studied under {0} and afterwards instructed {1} .",
        "Took lessons from {0} ; gave lessons to {1} .",
        "A follower of {0} who later guided {1} .",
    )),
    Group("family", "person", (
        "Married {0} ; raised by {1} .",
        "Shares a house with {0} ; descends from {1} .",
        "Exchanged rings with {0} ; the child of {1} .",
    )),
    Group("labour", "person", (
        "Earns a living at {0} as a {1} .",
        "On the payroll of {0} , hired as a {1} .",
        "Draws wages from {0} , serving as a {1} .",
    )),
    Group("dates", "person", ("Came to life in {0} .", "Entered the world in {0} .", "Dated from {0} .")),
    Group("alias", "person", ("Also known as {0} .", "Friends say {0} .", "Nicknamed {0} .")),
    Group("makers", "work", (
        "Penned by {0} with pictures by {1} .",
        "The words are by {0} , the drawings by {1} .",
        "Text from {0} ; plates from {1} .",
    )),
    Group("print", "work", (
        "Printed by {0} ; the story unfolds in {1} .",
        "Sold through {0} ; it takes the reader to {1} .",
        "Brought out by {0} ; the plot happens in {1} .",
    )),
    Group("staff", "company", (
        "Started by {0} and now run by {1} .",
        "Set up by {0} ; orders come from {1} .",
        "Launched by {0} , today managed by {1} .",
    )),
    Group("market", "company", (
        "Keeps offices in {0} and competes with {1} .",
        "Located in {0} ; fights {1} for buyers .",
        "Housed in {0} ; loses customers to {1} .",
    )),
    Group("rule", "place", (
        "Governed by {0} ; the walls were drawn by {1} .",
        "Its council obeys {0} ; its streets were laid out by {1} .",
        "Under the rule of {0} ; the plans came from {1} .",
    )),
    Group("ties", "place", (
        "Paired with {0} ; most hands labour at {1} .",
        "Exchanges visits with {0} ; many jobs depend on {1} .",
        "Linked by treaty to {0} ; taxes flow from {1} .",
    )),
)  # fmt: skip

RELATIONS = (
    Relation("birthplace", "life", "place", ("birth town", "native place", "cradle", "origin"),
             ("first saw light in", "grew up in", "left")),
    Relation("residence", "life", "place", ("home", "dwelling", "address", "abode"),
             ("later settled in", "then moved to", "now a resident of")),
    Relation("teacher", "school", "person", ("teacher", "mentor", "tutor", "schoolmaster"),
             ("studied under", "took lessons from", "a follower of")),
    Relation("pupil", "school", "person", ("pupil", "student", "trainee", "disciple"),
             ("afterwards instructed", "gave lessons to", "who later guided")),
    Relation("spouse", "family", "person", ("spouse", "partner", "better half", "consort"),
             ("married", "shares a house with", "exchanged rings with")),
    Relation("parent", "family", "person", ("parent", "elder", "forebear", "ancestor"),
             ("raised by", "descends from", "the child of")),
    Relation("employer", "labour", "company", ("employer", "workplace", "paymaster", "hirer"),
             ("earns a living at", "on the payroll of", "draws wages from")),
    Relation("job", "labour", "job", ("profession", "trade", "craft", "calling"),
             ("as a", "hired as a", "serving as a")),
    Relation("year", "dates", "year", ("birth year", "natal year", "first year", "starting year"),
             ("came to life in", "entered the world in", "dated from")),
    Relation("alias", "alias", "alias", ("alias", "epithet", "byname", "sobriquet"),
             ("also known as", "friends say", "nicknamed")),
    Relation("author", "makers", "person", ("author", "writer", "novelist", "wordsmith"),
             ("penned by", "the words are by", "text from")),
    Relation("illustrator", "makers", "person", ("illustrator", "artist", "painter", "sketcher"),
             ("with pictures by", "the drawings by", "plates from")),
    Relation("publisher", "print", "company", ("publisher", "imprint", "issuer", "bookseller"),
             ("printed by", "sold through", "brought out by")),
    Relation("setting", "print", "place", ("setting", "backdrop", "scene", "locale"),
             ("the story unfolds in", "it takes the reader to", "the plot happens in")),
    Relation("founder", "staff", "person", ("founder", "creator", "originator", "initiator"),
             ("started by", "set up by", "launched by")),
    Relation("boss", "staff", "person", ("boss", "chief", "director", "head"),
             ("now run by", "orders come from", "today managed by")),
    Relation("seat", "market", "place", ("seat", "base", "site", "headquarters"),
             ("keeps offices in", "located in", "housed in")),
    Relation("rival", "market", "company", ("rival", "opponent", "competitor", "challenger"),
             ("competes with", "fights", "loses customers to")),
    Relation("mayor", "rule", "person", ("mayor", "ruler", "leader", "chair"),
             ("governed by", "its council obeys", "under the rule of")),
    Relation("architect", "rule", "person", ("architect", "planner", "designer", "builder"),
             ("the walls were drawn by", "its streets were laid out by", "the plans came from")),
    Relation("sister", "ties", "place", ("sister town", "twin city", "friend town", "allied city"),
             ("paired with", "exchanges visits with", "linked by treaty to")),
    Relation("firm", "ties", "company", ("top firm", "largest company", "main business", "biggest shop"),
             ("most hands labour at", "many jobs depend on", "taxes flow from")),
)  # fmt: skip

BANKS = 4  # the last one is held out: no head ever trains on it
HELD_OUT_BANK = BANKS - 1
ASK = ("Name the {0} .", "Which is the {0} ?", "What is the {0} ?", "Tell me the {0} .")
WHICH = (
    "Which of {a} and {b} has the {rel} {value} ?",
    "Of {a} and {b} , who has the {rel} {value} ?",
    "The {rel} {value} belongs to {a} or {b} ?",
    "Whose {rel} is {value} , {a} or {b} ?",
)
SAME = (
    "Do {a} and {b} have the same {rel} ?",
    "Is the {rel} of {a} equal to the {rel} of {b} ?",
    "Have {a} and {b} one {rel} ?",
    "Does {a} share a {rel} with {b} ?",
)
OLDER = (
    "Who is older , {a} or {b} ?",
    "Who has more years , {a} or {b} ?",
    "Who came earlier , {a} or {b} ?",
    "Who is senior , {a} or {b} ?",
)
