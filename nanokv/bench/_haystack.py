"""Prompts that hide facts in a long text and ask for them: reproducible from a seed, of any length in tokens.

The insight: what makes a haystack easy or hard is not its length alone. In one filler sentence repeated over
and over any fact stands out; in varied prose, and more so among facts of its own kind, it does not. So a kind is a
function that draws its facts, its question and what a right answer must contain, and says whether its filler varies;
everything else (filling up to a length, hiding, asking) is done once, here.

A fact is a paragraph of its own, and its key comes last in it. The question repeats the words before the key, so
attention finds those; where digits are tokens of their own, a pool over 3 neighbours on either side saves the first
of them, and the last must be earned: near misses are answers that end too early.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from ..tokenizer import Tokenizer

TEMPLATES = (
    "{name} {did} the {adjective} {thing} {where} {when}.",
    "{when}, {name} walked past the {place} and {did} the {adjective} {thing}.",
    "The {thing} that {name} brought from the {place} was {adjective} and rather {adjective}.",
    "Nobody in the {place} knew why the {thing} had turned so {adjective}.",
    "{name} asked {name} whether the {thing} {where} was still {adjective}.",
    "{weather}, so {name} and {name} stayed {where} and talked about {topic}.",
    "One {adjective} {thing} stood {where}, and {name} {did} it {when}.",
    "People said that {name} cared more about {topic} than about any {thing}.",
    "{name} wrote a letter about {topic} {when}, but left it {where}.",
    "It took {name} a whole week to carry the {adjective} {thing} to the {place}.",
    "{when}, a stranger {did} the last {thing} of the {place}.",
    "If {name} had known more about {topic}, the {thing} would not be {where} now.",
    "{weather}; even the {place} looked {adjective}.",
    "{name} laughed at the {adjective} {thing}, and {name} did not.",
)
FILL = {
    "name": "Marta Oren Priya Jonas Lucia Tomas Ingrid Malik Hana Pavel Elena Samir Greta Diego Nadia Owen Yuki Farah Leon Amara".split(),
    "did": "repaired painted borrowed sold found lost cleaned hid admired measured copied dropped wrapped bought returned described".split(),
    "adjective": "heavy quiet golden broken pale narrow curious wooden modern dusty bright silver crooked cheap elegant damp round hollow".split(),
    "thing": "lantern chair violin basket ladder map clock kettle carpet mirror bicycle painting drawer blanket statue telescope wagon bell".split(),
    "place": "market harbour library bakery station orchard theatre school hospital workshop bridge village garden office café square".split(),
    "where": "behind the fence|near the river|under the stairs|on the balcony|by the old gate|in the cellar|beside the road|above the shop"
             "|at the end of the street|between two trees|in a corner of the yard|on the upper floor".split("|"),
    "when": "last spring|before breakfast|on a Tuesday|after the concert|late at night|during the holidays|at the end of summer|around noon"
            "|just before the storm|in the first week of May|after a long silence|the day before".split("|"),
    "weather": "The rain would not stop|A warm wind came from the south|Snow covered the roofs|The fog was thick|It was far too hot"
               "|Clouds hung over the hills|The morning was clear and cold|Thunder rolled in the distance".split("|"),
    "topic": "the history of tea|train timetables|the price of wool|learning to swim|old maps|the habits of owls|bread and its many shapes"
             "|the new mayor|growing tomatoes|the sound of church organs|distant relatives|how glass is made|the rules of chess".split("|"),
}  # fmt: skip
REPEATED = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
HIDDEN = (
    "lighthouse observatory greenhouse monastery aquarium windmill museum castle distillery embassy planetarium shipyard"
    " cathedral vineyard brewery quarry"
).split()  # places that keep a code; the filler never visits them


LEAST = 12  # tokens that a sentence of filler has at least, or nearly


@dataclass(frozen=True)
class Task:
    """Sentences to hide (the first is what is asked for; their order is kept if `chained`), and the question.

    cue: how the answer begins, so that all that is left to say is what was hidden.
    """

    facts: list[str]
    question: str
    cue: str
    expected: list[str]  # what a right answer contains, all of it
    varied: bool = True  # the filler
    chained: bool = False


def prose(rng: Random) -> Task:
    """One key in varied prose."""
    (place,), (key,) = rng.sample(HIDDEN, 1), keys(rng, 1)
    return Task([fact(place, key)], *one(place), [key])


def repeated(rng: Random) -> Task:
    """One key in a few sentences that repeat."""
    (place,), (key,) = rng.sample(HIDDEN, 1), keys(rng, 1)
    return Task([fact(place, key)], *one(place), [key], varied=False)


def multi_key(rng: Random, n: int = 4) -> Task:
    """One key among others of its kind."""
    places, codes = rng.sample(HIDDEN, n), keys(rng, n)
    return Task([*map(fact, places, codes)], *one(places[0]), codes[:1])


def multi_value(rng: Random, n: int = 3) -> Task:
    """One place with several keys; all are asked for."""
    (place,), codes = rng.sample(HIDDEN, 1), keys(rng, n)
    return Task([fact(place, c) for c in codes], f"What are all the secret codes of the {place}?", f"The secret codes of the {place} are", codes)


def multi_query(rng: Random, n: int = 2) -> Task:
    """Several places, and all of their keys are asked for."""
    places, codes = rng.sample(HIDDEN, n), keys(rng, n)
    both = " and the ".join(places)
    return Task([*map(fact, places, codes)], f"What are the secret codes of the {both}?", f"The secret codes of the {both} are", codes)


def variables(rng: Random, n: int = 3) -> Task:
    """A chain of variables, each set to the one before; all names are asked for."""
    names, (key,) = ["".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=3)) for _ in range(n)], keys(rng, 1)
    facts = [f"Variable {a} is set to {b}." for a, b in zip(names, [key, *names])]
    return Task(facts, f"Which variables hold the value {key}?", f"The variables that hold the value {key} are", names, chained=True)


KINDS: dict[str, Callable[[Random], Task]] = {
    "repeated": repeated, "prose": prose, "multi-key": multi_key, "multi-value": multi_value, "multi-query": multi_query,
    "variables": variables,
}  # fmt: skip


def keys(rng: Random, n: int) -> list[str]:
    """n different five-digit numbers."""
    return [str(k) for k in rng.sample(range(10_000, 100_000), n)]


def fact(place: str, key: str) -> str:
    """The sentence that hides a key."""
    return f"The secret code of the {place} is {key}."


def one(place: str) -> tuple[str, str]:
    """The question for one key, and how its answer begins."""
    return f"What is the secret code of the {place}?", f"The secret code of the {place} is"


def sentences(rng: Random, varied: bool = True) -> Iterator[str]:
    """Filler without end; varied: no sentence twice."""

    class Drawn(dict):
        def __missing__(self, slot: str) -> str:
            return rng.choice(FILL[slot])

    seen: set[str] = set()
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)) if varied else REPEATED:
            s = template.format_map(Drawn())
            if not varied or s not in seen:
                seen.add(s)
                yield s[0].upper() + s[1:]


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to be read. depth: where the first fact stands, from 0 (the text's start) to 1."""

    tokens: list[int]
    expected: list[str]
    length: int  # as it was asked for; the tokens are a few more or less
    depth: float
    max_new: int  # tokens that a right answer may take

    def found(self, answer: str) -> bool:
        """Does the answer hold everything that was asked for?"""
        return all(e in answer for e in self.expected)


def prompts(tokenizer: Tokenizer, n: int, lengths: Sequence[int], kind: str = "prose", question: str = "after", seed: int = 0) -> list[Prompt]:
    """n prompts of so many tokens each, lengths in equal parts, and for each length every depth in equal parts.

    question: does it stand "after" or "before" the text? ValueError for what there is none of, or a length that cannot be.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind of needle is called {kind!r}; there are {', '.join(KINDS)}")
    if question not in ("after", "before"):
        raise ValueError(f"the question stands after or before the text, not {question!r}")
    made = []
    for i in range(n):
        which, rest = divmod(i * len(lengths), n)
        rng = Random(f"{kind} {seed} {i}")
        depth = (rest + rng.random() * len(lengths)) / n  # in (0, 1): a random place in each of n / len(lengths) parts
        made.append(hide(tokenizer, KINDS[kind](rng), lengths[which], min(depth, 1.0), question == "after", rng))
    return made


def hide(tokenizer: Tokenizer, task: Task, length: int, depth: float, after: bool, rng: Random) -> Prompt:
    """The facts of a task in filler of the size that makes the prompt `length` tokens long (repeated filler: nearly)."""
    at = [depth, *(rng.random() for _ in task.facts[1:])]
    if task.chained:
        at.sort()

    def ids(filler: list[str]) -> list[int]:
        parts, start = [], 0
        for place, fact in sorted(zip(at, task.facts)):
            end = round(place * len(filler))
            parts += [" ".join(filler[start:end]), fact]
            start = end
        text = "\n\n".join(filter(None, [*parts, " ".join(filler[start:])]))
        if after:
            return asked(tokenizer, f"{text}\n\n{task.question}", task.cue)
        return asked(tokenizer, f"{task.question}\n\n{text}")  # no cue, for it would repeat the question

    filler, missing = [], length - len(ids([]))
    if missing < 0:
        raise ValueError(f"{length} tokens cannot hold the question and its facts: {length - missing} can")
    sizes = ((s, len(tokenizer.encode(" " + s, bos=False))) for s in sentences(rng, task.varied))
    for s, size in islice(sizes, 10 * length):
        if size == missing or size + LEAST <= missing:  # what is left must fit a sentence
            filler.append(s)
            missing -= size
        if missing < LEAST:
            break
    room = 3 + 8 * len(task.expected) + (0 if after else 12)  # without a cue the answer says it itself
    return Prompt(ids(filler), task.expected, length, at[0], room)


def asked(tokenizer: Tokenizer, text: str, cue: str = "") -> list[int]:
    """A prompt's tokens, through the model's chat template if it has one, and the answer's beginning."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(f"{text}\n\nAnswer: {cue}".rstrip())
    return tokenizer.chat([{"role": "user", "content": text}]) + tokenizer.encode(cue, bos=False)
