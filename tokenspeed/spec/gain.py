"""How many tokens a round with a tree will bring: acceptance by depth, followed while serving. No torch.

A node at depth d is accepted, given its parent was, with probability sigmoid(logit(prior_d) + level). The prior belongs
to the tree's shape; the level says how predictable the text is. It is the sum of one that all requests share, which
follows the workload, and each request's own offset, shrunk to zero. One Newton step of logistic regression a round
moves both, with sums of information that forget.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from tokenspeed.config import Shape

_LOW, _HIGH, _STEP = -5.0, 5.0, 0.1  # levels that are tabulated
_NUM_LEVELS = round((_HIGH - _LOW) / _STEP) + 1
_SHRINK_SHARED, _SHRINK_OWN = 1.0, 12.0  # information of "the level is 0", "the offset is 0"
_FORGET_ROW, _FORGET_MOST = 0.99, 0.75  # of the shared information, for a row and for a round at most
_FORGET_PLAIN = 0.97  # of it, a plain round: what was seen grows old
_FORGET_OWN = 0.95  # of a request's information, a round
_FORGET_FIT = 0.999  # of what corrects a shape's prior, a round of that shape
_FIT_TOKENS = 100.0  # tokens after which half of a prior's correction is believed


@dataclass
class Offset:
    """One request's level beside the shared one."""

    value: float = 0.0
    information: float = 0.0


def default_prior(shape: Shape) -> tuple[float, ...]:
    """Acceptance at each depth, given the parent's, where nothing is known of the draft: more for wide trees."""
    return (1 - 0.3 / math.sqrt((shape.nodes - 1) / shape.steps),) * shape.steps


def prior_for(shape: Shape, known: Mapping[Shape, Sequence[float]]) -> tuple[float, ...]:
    """Acceptance at each depth as it is known, else as of the tree that is most like it, else `default_prior`.

    Below the other tree's last depth, it stays what it is there.
    """
    if not known:
        return default_prior(shape)

    def unlike(other: Shape) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(astuple(shape), astuple(other), strict=True))

    prior = known[min(known, key=unlike)]
    return (*prior, *prior[-1:] * shape.steps)[: shape.steps]


class Acceptance:
    """What a shape's rounds bring at a level, tabulated, and how far its prior was off."""

    def __init__(self, prior: Sequence[float]):
        self.steps = len(prior)
        logits = [math.log(p / (1 - p)) for p in prior]
        self.raw_tokens: list[float] = []  # by level; without the fit
        self.scores: list[list[float]] = []  # by level and number accepted: d log-likelihood / d level
        self.information: list[list[float]] = []
        for i in range(_NUM_LEVELS):
            level = _LOW + i * _STEP
            chances = [1 / (1 + math.exp(-logit - level)) for logit in logits]
            tokens, reach, score, information = 1.0, 1.0, 0.0, 0.0
            scores, informations = [], []
            for p in chances:
                scores.append(score - p)  # accepted so far, this one not
                informations.append(information + p * (1 - p))
                score, information = score + 1 - p, information + p * (1 - p)
                reach *= p
                tokens += reach
            self.raw_tokens.append(tokens)
            self.scores.append([*scores, score])
            self.information.append([*informations, information])
        self._seen = self._expected = 0.0  # tokens of rounds of this shape, forgetting

    @property
    def fit(self) -> float:
        """Tokens seen over tokens expected, shrunk to 1."""
        return (self._seen + _FIT_TOKENS) / (self._expected + _FIT_TOKENS)

    def tokens(self, levels: Mapping[int, int]) -> float:
        """Expected tokens of rows, at least 1 of each; `levels`: how many rows there are of each level."""
        fit, table = self.fit, self.raw_tokens
        return sum(count * max(1.0, table[i] * fit) for i, count in levels.items())

    def learn(self, expected: float, seen: float) -> None:
        """Books a round that should have brought `expected` tokens (without the fit) and brought `seen`."""
        self._expected = _FORGET_FIT * self._expected + expected
        self._seen = _FORGET_FIT * self._seen + seen


class Gain:
    """Expected tokens of a round for each shape, over all requests.

    Args:
        priors: acceptance by depth of each shape, for example from `default_prior`.
    """

    def __init__(self, priors: dict[Shape, Sequence[float]]):
        self._shapes = {shape: Acceptance(prior) for shape, prior in priors.items()}
        self.level = self._information = 0.0

    def levels(self, offsets: Iterable[Offset]) -> Counter[int]:
        """How many of the rows with these offsets are at each tabulated level."""
        level = self.level
        return Counter([level_index(level + offset.value) for offset in offsets])

    def tokens(self, shape: Shape | None, levels: Counter[int]) -> float:
        """Expected tokens of a round over rows at these levels."""
        return float(levels.total()) if shape is None else self._shapes[shape].tokens(levels)

    def update(self, shape: Shape, rows: Sequence[tuple[Offset, int]]) -> float:
        """Learns from a round: of each row its offset and the number of draft tokens that were accepted.

        Returns:
            the tokens that were expected of it.
        """
        model, level = self._shapes[shape], self.level
        levels = [level_index(level + offset.value) for offset, _ in rows]
        promised = model.tokens(Counter(levels))
        scores = informations = expected = 0.0
        for i, (offset, accepted) in zip(levels, rows, strict=True):
            score, information = model.scores[i][accepted], model.information[i][accepted]
            expected += model.raw_tokens[i]
            scores, informations = scores + score, informations + information
            offset.information = _FORGET_OWN * offset.information + information
            offset.value += score / (offset.information + _SHRINK_OWN)
        keep = max(_FORGET_MOST, _FORGET_ROW ** len(rows))
        self._information = keep * self._information + informations
        step = scores / (self._information + _SHRINK_SHARED)
        self.level = min(max(level + step, _LOW), _HIGH)
        model.learn(expected, sum(accepted + 1 for _, accepted in rows))
        return promised

    def pass_by(self) -> None:
        """A plain round was run: it says nothing, but time has passed."""
        self._information *= _FORGET_PLAIN


def level_index(level: float) -> int:
    """The tabulated level that is nearest."""
    i = int((level - _LOW) / _STEP + 0.5)
    return 0 if i < 0 else _NUM_LEVELS - 1 if i >= _NUM_LEVELS else i
