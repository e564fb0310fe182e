"""A credit rule says which of a reply's tokens earn its main reward, and whether what is said in its futures earns too.

The rules of recipes are here (the whole reply; along the tree) and in the files beside this. A new one is such a file
with `@rules.register("name")`, or is named by its path, `my_pkg.module:Rule`. A constructor names what it takes of the
recipe's `credit` (`tokens`, `gamma`, `split`, `forks`); other parameters are options of its own.

The tree: a reply's futures are leaves. Where they forked they have siblings: branches that went on from the same words.
A branch is worth the mean of what is below it, each fork counting its ways alike, and so is the reply. What the policy
said in a branch is judged beside its siblings, from the state in which it was said: the reply's own advantage says
nothing about it. Nothing is sampled for that, and nothing is trained twice.

It knows neither how futures are played nor how advantages are estimated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from upshot.config.recipe import CreditConfig
from upshot.config.registry import Registry, parameters_of
from upshot.core.conversation import Conversation, derive_seed
from upshot.core.errors import UserError
from upshot.core.score import Score, mean_score, naming_errors, show
from upshot.rewards.credit import MAIN, Credit, MetricWeight, Reward, Span, combine, restrict_to, sampled_spans
from upshot.rollout.reply import Branch, Future, Rollout

SAME = 1e-9
"""Rewards closer than this are alike."""


@dataclass(frozen=True, slots=True)
class ScoredFutures:
    """What a credit rule makes a reward of."""

    futures: Sequence[Future]
    weights: Mapping[str, MetricWeight]
    """How each metric enters the reward …"""
    main_weights: Mapping[str, MetricWeight]
    """… and those metrics among them that make up its main part."""
    every_turn: bool
    """Whether each turn of the policy has futures of its own, not the last one alone."""


class CreditRule(ABC):
    """Which tokens earn the main reward."""

    one_reward = True
    """Whether all trained tokens of a reply earn the same; False: its turns earn something of their own."""
    trains_futures = False
    """Whether what the policy says in the futures is trained as well."""

    @abstractmethod
    def credit(self, reply: Rollout, total: Score) -> Credit:
        """The tokens that earn the main reward of a reply."""

    def score(self, reply: Rollout, scored: ScoredFutures) -> tuple[Reward, Credit]:
        """The reward of a reply by its futures, and the tokens that earn the main part of it."""
        ways = mean_by_way(scored.futures)
        return combine(ways, scored.weights), self.credit(reply, combine(ways, scored.main_weights).total)


rules: Registry[CreditRule] = Registry("credit rule", "upshot.rollout.credit", base=CreditRule)
"""Rules that a recipe can name in `credit.by`."""
SHARED = ("tokens", "gamma", "split", "forks")
"""What rules may take of the recipe's section."""


def credit_rule(config: CreditConfig) -> CreditRule:
    """The rule of a recipe."""
    rule = rules.create(config.by, config.options, "credit", **{name: getattr(config, name) for name in SHARED})
    if ":" in config.by:
        rule.credit = partial(_checked, rule.credit, config.by)  # type: ignore[method-assign]
    return rule


def _checked(credit: Callable[[Rollout, Score], Credit], name: str, reply: Rollout, total: Score) -> Credit:
    """The credit by a rule of the user's own; refused if it is not a `Credit`."""
    with naming_errors(f"credit.by '{name}'"):
        credited = credit(reply, total)
    if not isinstance(credited, Credit):
        raise UserError(f"credit.by '{name}': credit() should return a Credit; it returned {show(credited)}")
    return credited


def check_rule(config: CreditConfig) -> None:
    """Refuse an unknown rule, wrong options of it, and settings that it does not take."""
    rules.check(config.by, config.options, "credit", **dict.fromkeys(SHARED))
    named, _, _ = parameters_of(rules.get(config.by, "credit.by"))
    for name in SHARED:
        if name not in named and getattr(config, name) != type(config).model_fields[name].default:
            raise UserError(f"credit.{name} has no effect with credit.by={config.by}; leave it out")


@rules.register("reply")
class WholeReply(CreditRule):
    """The main reward to all trained tokens of the episode alike."""

    def __init__(self, tokens: str) -> None:
        self.tokens = tokens

    def credit(self, reply: Rollout, total: Score) -> Credit:
        """See `CreditRule`."""
        conversation = reply.conversation
        return Credit({MAIN: total}, restrict_to(sampled_spans(conversation.mask), conversation, self.tokens))


@rules.register("tree")
class AlongTree(WholeReply):
    """The reply as a whole, and every branch below it (`Rollout.siblings`)."""

    trains_futures = True

    def __init__(self, tokens: str, forks: float) -> None:
        super().__init__(tokens)
        self.forks = forks

    def score(self, reply: Rollout, scored: ScoredFutures) -> tuple[Reward, Credit]:
        """See `CreditRule`."""
        # Without forks (nobody went on) the reply itself is all that the policy said.
        if all(future.path and future.by for future in scored.futures):
            forks = grow(scored.futures, scored.main_weights, self.tokens)
            reply.siblings, reply.forks = draw(forks, self.forks), len(forks)
        return super().score(reply, scored)


def children(futures: Iterable[Future], depth: int = 0) -> list[list[Future]]:
    """Futures by the way that they took at the fork of a depth, in order; one without a path has a way of its own."""
    ways: dict[int | str, list[Future]] = {}
    for number, future in enumerate(futures):
        ways.setdefault(future.path[depth] if future.path else f"own {number}", []).append(future)
    return list(ways.values())


def mean_by_way(futures: Sequence[Future], depth: int = 0) -> list[Mapping[str, Score]]:
    """The scores of every way at a fork: a future's own, or where it forked again the means of what came of it."""
    means: list[Mapping[str, Score]] = []
    for way in children(futures, depth):
        if len(way[0].path) <= depth + 1:
            means.append(way[0].scores)
            continue
        below = mean_by_way(way, depth + 1)
        names = dict.fromkeys(chain.from_iterable(below))
        means.append({name: mean_score(scores[name] for scores in below if name in scores) for name in names})
    return means


def grow(futures: Sequence[Future], weights: Mapping[str, MetricWeight], tokens: str = "all") -> list[list[Branch]]:
    """The branches of every fork below a reply, credited with what came of them; those nearest to the reply first."""
    level = [(list(futures), 1.0)]
    out: list[list[Branch]] = []
    depth = 0
    while level:
        after = []
        for some, share in level:
            ways = children(some, depth)
            branches = [_branch(way, depth, weights, tokens) for way in ways]
            present = len(ways) - [branch.reward.total.value for branch in branches].count(None)
            for way, branch in zip(ways, branches, strict=True):
                branch.share = share / max(present, 1)
                if len(way[0].path) > depth + 1:
                    after.append((way, branch.share))
            out.append(branches)
        level, depth = after, depth + 1
    return out


def draw(forks: list[list[Branch]], part: float) -> list[list[Branch]]:
    """A random part of the forks, each standing for those that were left out: in the mean nothing changes.

    Which ones depends on the conversations' own seeds, so that a resumed run draws the same.
    """
    drawn = [fork for fork in forks if derive_seed(fork[0].conversation.seed, "draw", fork[0].path) < part * 2**63]
    for fork in drawn:
        for branch in fork:
            branch.share /= part
    return drawn


def _branch(futures: Sequence[Future], depth: int, weights: Mapping[str, MetricWeight], tokens: str) -> Branch:
    """The branch that some futures run through after the fork of a depth."""
    first = futures[0]
    forked_again = len(first.path) > depth + 1
    whole, start = first.conversation, first.forks[depth]
    conversation = whole
    if forked_again:
        conversation = Conversation(whole.row, whole.seed, whole.key, whole.turns[: first.forks[depth + 1]])
    scores = mean_by_way(futures, depth + 1) if forked_again else [first.scores]
    reward = combine(scores, weights)
    spoken = [Span(at, at + len(sample.ids)) for at, sample in conversation.places(start) if sample.ids]
    credit = Credit({MAIN: reward.total}, restrict_to(spoken, conversation, tokens))
    return Branch(conversation, first.path[: depth + 1], start, reward, credit)


def branch_off(conversation: Conversation, start: int, reward: Reward, credit: Credit) -> Branch:
    """A path of the episode itself, which earns what the episode earns: what was said before its turn `start` is
    another path's, and not trained twice."""
    first = min([at for at, sample in conversation.places(start) if sample.ids], default=len(conversation.ids))
    spans = tuple(span for span in credit.spans if span.start >= first)
    return Branch(conversation, (), start, reward, replace(credit, spans=spans))


def compared(replies: Iterable[Rollout], every: bool) -> list[list[list[Branch]]]:
    """The branches that have something to learn from their siblings, by how deep their fork is; fork by fork.

    every: those of all forks in which the policy spoke.
    """
    levels: dict[int, list[list[Branch]]] = {}
    for reply in replies:
        for branches in reply.siblings:
            if why_silent(branches, every) is None:
                levels.setdefault(len(branches[0].path), []).append(branches)
    return [levels[depth] for depth in sorted(levels)]


def why_silent(branches: Sequence[Branch], every: bool = False) -> str | None:
    """Why the branches of a fork teach nothing; None where they do.

    alone: fewer than two have a reward. flat: all are worth the same. unsaid: the policy said nothing in any of them.
    every: branches are trained also where nothing is learned about them by comparing.
    """
    spoken = any(branch.credit.trains for branch in branches)
    if every and spoken:
        return None
    values = [branch.reward.total.value for branch in branches if branch.reward.total.value is not None]
    if len(values) < 2:
        return "alone"
    if max(values) - min(values) < SAME:
        return "flat"
    return None if spoken else "unsaid"


def measure_tree(replies: Sequence[Rollout], every: bool = False) -> dict[str, float]:
    """Of a step's forks below replies: how many there are and are drawn, how many branches are trained or missing, and
    why drawn forks teach nothing; every: branches are trained whether or not their siblings differ."""
    counts = dict.fromkeys(("forks", "drawn", "branches", "missing", "alone", "flat", "unsaid"), 0.0)
    for reply in replies:
        counts["forks"] += max(reply.forks, len(reply.siblings))
        counts["drawn"] += len(reply.siblings)
        for branches in reply.siblings:
            why = why_silent(branches, every)
            if why is not None:
                counts[why] += 1
            for branch in branches:
                counts["branches"] += why is None and branch.credit.trains
                counts["missing"] += branch.reward.total.is_missing
    return {f"tree/{name}": count for name, count in counts.items()} if counts["forks"] else {}


def is_flat(group: Sequence[Rollout]) -> bool:
    """Whether nothing tells the group's replies apart: no part of the reward, and no fork below one of them."""
    parts: dict[str, list[float]] = {}
    for reply in group:
        for fork in reply.siblings:
            if why_silent(fork) is None:
                return False
        for name, score in reply.credit.parts.items() if reply.credit is not None else ():
            if score.value is not None:
                parts.setdefault(name, []).append(score.value)
    return all(max(values) - min(values) < SAME for values in parts.values())
