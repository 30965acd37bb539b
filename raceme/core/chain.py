"""The chain of a run's features on the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, RecordDict

from raceme.core.feature import Feature, FeatureContext, Held, Refusal, StepTests
from raceme.core.registry import FEATURES
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Outcome, Request, Update
from raceme.core.state import NoState, check_storable, from_tree, stored

if TYPE_CHECKING:
    from raceme.core.config import RunConfig
    from raceme.core.progress import Evaluation
    from raceme.core.strategy import Needs


class Chain:
    """The features of a run, in order.

    Parameters
    ----------
    features : Mapping[str, Feature]
        Features by name.
    """

    def __init__(self, features: Mapping[str, Feature] | None = None) -> None:
        self._features = dict(features or {})
        for name, feature in self._features.items():
            check_storable(feature.state_type, f"the state of {name}")
        self._stateful = {n: of for n, of in self._features.items() if of.state_type is not NoState}
        self._context: FeatureContext | None = None

    @classmethod
    def of(cls, config: RunConfig) -> Chain:
        """Create the features of a configuration.

        Raises
        ------
        UserError
            A name does not exist, or an option is out of its range.
        """
        made = {name: made_of(config, name) for name in config.feature_names}
        return cls({name: feature for name, feature in made.items() if feature.is_on})

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features.values())

    @cached_property
    def keeps_bases(self) -> bool:
        """Whether a feature needs the models that clients train from."""
        return any(feature.keeps_bases for feature in self)

    @property
    def upload_size(self) -> float:
        """Size of trained models on their way to the server, as a share."""
        return math.prod(feature.upload_size for feature in self)

    @property
    def settings(self) -> frozenset[str]:
        """Settings that features add to requests."""
        return frozenset().union(*(feature.settings for feature in self))

    def cost(self, settings: ConfigRecord, context: Context, examples: int) -> float:
        """Return the additional work of a training message, in passes over a client's samples."""
        return sum(feature.cost(settings, context, examples) for feature in self)

    @property
    def holds(self) -> Callable[[str], bool] | None:
        """Whether to withhold work from an idle client for now; None if no feature ever does."""
        return self._held_by([one for one in self if type(one).holds is not Feature.holds])

    @property
    def holds_for_good(self) -> Callable[[str], bool] | None:
        """Whether to withhold work from a client even if no other works; None if never."""
        return self._held_by([one for one in self if one.holds_for_good])

    def _held_by(self, features: Sequence[Feature]) -> Callable[[str], bool] | None:
        if not features:
            return None
        return lambda client: any(one.holds(client, self._connected) for one in features)

    def begin(self, context: FeatureContext) -> None:
        """Connect the features with a run."""
        self._context = context

    def request(self, request: Request) -> Request:
        """Return a request as the features change it."""
        for feature in self:
            request = feature.on_request(request, self._connected)
        return request

    def sent(self, task: InFlight) -> None:
        """Inform the features of a task that was sent."""
        for feature in self:
            feature.on_sent(task, self._connected)

    def reply(self, content: RecordDict) -> RecordDict:
        """Return the content of a training reply, decoded by the features.

        Raises
        ------
        InvalidReplyError
            A feature refuses it.
        """
        for feature in self:
            content = feature.on_reply(content, self._connected)
        return content

    def update(self, update: Update, after: Feature | None = None) -> Update | Held:
        """Pass a valid update through the features: return it as changed, or a `Held`.

        Parameters
        ----------
        after : Feature, optional
            The feature that has released the update; by default the update is new.

        Raises
        ------
        InvalidReplyError
            A feature refuses the update.
        """
        features = list(self)
        for feature in features[features.index(after) + 1 if after else 0 :]:
            found = feature.on_update(update, self._connected)
            if isinstance(found, Refusal):
                raise InvalidReplyError(found.reason)
            if isinstance(found, Held):
                return found
            update = found
        return update

    def pending(self) -> Iterator[tuple[Feature, Request | Update | Refusal]]:
        """Yield each feature that holds updates with its next step for one of them."""
        for feature in self:
            for item in feature.pending(self._connected):
                yield feature, item

    def answer(self, answer: Answer) -> None:
        """Inform the features of the answer to a request for a held update.

        Raises
        ------
        InvalidReplyError
            A feature refuses it.
        """
        for feature in self:
            feature.on_answer(answer, self._connected)

    def wake_at(self) -> float:
        """Return the next time at which :meth:`pending` changes without an answer."""
        return min((feature.wake_at(self._connected) for feature in self), default=math.inf)

    def applied(self, updates: Sequence[Update], outcomes: Sequence[Outcome]) -> None:
        """Inform the features of an aggregation."""
        for feature in self:
            feature.on_applied(updates, outcomes, self._connected)

    def closed(self, task: InFlight) -> None:
        """Inform the features of the end of a task."""
        for feature in self:
            feature.on_closed(task, self._connected)

    def ends(self) -> str:
        """Return why a feature ends the run now, or an empty text."""
        return next(filter(None, (feature.ends(self._connected) for feature in self)), "")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the features by name.

        Raises
        ------
        UserError
            A state has values of other types than annotated.
        """
        return {
            name: stored(of.state, of.state_type, name, verified=not FEATURES.is_own(name))
            for name, of in self._stateful.items()
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore the states that :meth:`state_dict` returned.

        Raises
        ------
        ValueError
            The states are of other features.
        """
        if tree.keys() != self._stateful.keys():
            raise ValueError(f"the state is of {sorted(tree)}, not {sorted(self._stateful)}")
        for name, feature in self._stateful.items():
            feature.state = from_tree(feature.state_type, tree[name])

    def tests(self, is_end: bool) -> Iterator[tuple[str, StepTests]]:
        """Yield the names of features that begin tests now, with their tests."""
        for name, feature in self._features.items():
            if tests := feature.tests(self._connected, is_end):
                yield name, tests

    def tested(self, name: str, tests: Evaluation) -> None:
        """Inform a feature of the scores of its tests."""
        self._features[name].on_tested(tests, self._connected)

    @property
    def _connected(self) -> FeatureContext:
        assert self._context is not None, "the loop connects the features"
        return self._context


def resolved(config: RunConfig, needs: Needs) -> RunConfig:
    """Fill in the feature options that are ``auto`` and therefore chosen by the method."""
    for name in config.feature_names:
        config = config.with_values(**made_of(config, name).resolved(needs))
    return config


def made_of(config: RunConfig, name: str) -> Feature:
    """Create a feature with its options from a configuration."""
    kind = FEATURES.options_type(name)
    assert kind is not None, "every feature has options"
    made: Feature = FEATURES.make(name, config.read(kind, FEATURES.prefix(name)), config)
    return made
