"""Users' own Flower apps with Raceme's strategies instead of Flower's, on virtual time."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from adopted import app_with_kinds, grid_of
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import Result
from processes import ROOT
from quickstarts import (
    CLASSES,
    CONFIG,
    INPUTS,
    Net,
    initial_net,
    initial_numpy,
    initial_regression,
    load_net,
    numpy_app,
    sklearn_app,
    torch_app,
)

from raceme.core import events
from raceme.core.drop_in import SNIPPET
from raceme.core.errors import UserError
from raceme.core.requests import Outcome, Update
from raceme.records.record import RunRecord
from raceme.records.store import RunStore, read_events
from raceme.reporting.plots import accuracy_figure
from raceme.strategies import CASA, CFL, STRATEGIES, FedAvg, FedBuff, Panicle

NEEDS_KINDS = [name for name in STRATEGIES if STRATEGIES[name]().needs.kinds]
NEEDS_SAMPLES = ["cdfl"]
STOCK = [name for name in STRATEGIES if name not in (*NEEDS_KINDS, *NEEDS_SAMPLES)]

CSAFL_VARIANTS = ("ga-fedavg", "g-fedavg", "nog-fedavg", "r-fedavg", "t-fedavg", "ta-fedavg")
SPOKEN = {"casa-plus": "casa+", "ssgd": "stable sgd"}


@pytest.fixture(autouse=True)
def _as_a_process_begins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the logging of a new process: no handlers for Raceme, Flower's default level."""
    logger, flower = logging.getLogger("raceme"), logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    level = flower.level
    flower.setLevel(logging.INFO)
    yield
    flower.setLevel(level)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Messages of Flower's logger, which does not propagate them."""
    seen: list[str] = []
    logger = logging.getLogger("flwr")
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STOCK)
def test_every_method_drops_in_with_its_defaults(name: str) -> None:
    seen: list[events.Event] = []
    strategy = STRATEGIES[name]()
    tested: list[int] = []

    def central(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        assert [array.shape for array in arrays.to_numpy_ndarrays()] == [(3, 3), (3,)]
        tested.append(server_round)
        return MetricRecord({"mean": float(arrays.to_numpy_ndarrays()[0].mean())})

    result = strategy.start(
        grid_of(numpy_app(), nodes=6),
        initial_numpy(),
        num_rounds=2,
        evaluate_fn=central,
        observe=seen.append,
    )
    # Each model loads in the user's own dtype.
    for arrays in (result.arrays, *result.clusters.values()):
        assert [(a.shape, a.dtype) for a in arrays.to_numpy_ndarrays()] == [
            ((3, 3), np.float64),
            ((3,), np.float64),
        ]
    assert set(result.client_clusters) == {f"node-{1000 + index}" for index in range(6)}
    assert set(tested) == {0, 1, 2}
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2]
    assert list(result.evaluate_metrics_clientapp) == [1, 2]
    assert list(result.train_metrics_clientapp) == [1, 2]
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    if strategy.scheduling.rounds is None:
        # Probes have the weight 0.
        assert sum(update.weight > 0 for update in applied) == 12
    else:
        assert strategy.scheduling.rounds == 2
    ended = seen[-1]
    assert isinstance(ended, events.RunEnded)
    assert ended.reason == "2 rounds are over"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STOCK)
def test_a_single_round_trains_whatever_a_method_does_first(name: str) -> None:
    seen: list[events.Event] = []
    # More clients than any buffer holds updates.
    grid = grid_of(sklearn_app(), nodes=20)
    result = STRATEGIES[name]().start(grid, initial_regression(), num_rounds=1, observe=seen.append)
    assert any(array.any() for array in result.arrays.to_numpy_ndarrays())
    assert any(event.weight > 0 for event in seen if isinstance(event, events.UpdateApplied))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rounds", [2, 3])
def test_panicle_trains_the_regression_of_a_quickstart_in_a_few_rounds(
    rounds: int, lines: list[str]
) -> None:
    result = Panicle().start(grid_of(sklearn_app()), initial_regression(), num_rounds=rounds)
    # A model of zeros predicts the first of four classes.
    accuracy = result.evaluate_metrics_clientapp[rounds]["accuracy"]
    assert isinstance(accuracy, float)
    assert accuracy > 0.7
    (first,) = (line for line in lines if line.startswith(f"Round 1/{rounds}: "))
    assert re.search(r"(\d+) updates of 10 clients .* \d+ of them changed no model", first)


@pytest.mark.filterwarnings("ignore")
def test_a_run_too_short_to_train_reports_it(lines: list[str]) -> None:
    grid = grid_of(numpy_app(), nodes=6)
    Panicle().start(grid, initial_numpy(), max_updates=6)
    (said,) = (line for line in lines if "changed no model" in line)
    assert said == (
        "6 of 6 updates changed no model, as the first ones of a client do with Panicle: the run "
        "is too short. Give more updates or rounds."
    )


def test_a_method_that_changes_no_model_ends_all_the_same() -> None:
    class Idle(FedBuff):
        def on_update(self, update: Update) -> Outcome:
            return Outcome(cluster=0, staleness=0, weight=0.0)

    strategy = Idle()
    strategy.start(grid_of(numpy_app(), nodes=3), initial_numpy(), num_rounds=2)
    # 8 updates per client, then two rounds.
    assert strategy.progress.updates == 3 * 8 + 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NEEDS_KINDS)
def test_apps_that_state_what_methods_need_work_with_them(name: str) -> None:
    seen: list[events.Event] = []
    grid = grid_of(app_with_kinds(), nodes=6)
    strategy = STRATEGIES[name]()
    sent: set[str] = set()
    push = grid.push_messages
    grid.push_messages = lambda messages: push(noting(messages, sent))  # type: ignore[method-assign]
    result = strategy.start(
        grid, initial_net(), num_rounds=3, train_config=CONFIG, observe=seen.append
    )
    for arrays in (result.arrays, *result.clusters.values()):
        load_net(arrays)
    assert set(result.client_clusters) == {f"client-{index}" for index in range(6)}
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert not [event for event in seen if isinstance(event, events.UpdateRejected)]
    assert sent <= strategy.needs.kinds
    # FAACL compares clusters only every few rounds.
    assert sent or name == "faacl"


def noting(messages: list[Message], sent: set[str]) -> list[Message]:
    """Record the kinds of work that messages request."""
    listed = list(messages)
    for message in listed:
        kind = message.content.config_records.get("config", {}).get("kind", "train")
        if kind not in ("train", "evaluate"):
            sent.add(str(kind))
    return listed


def Counting(app: ClientApp, asked: list[int]) -> object:  # noqa: N802
    grid = grid_of(app)
    push = grid.push_messages

    def noted(messages: list[Message]) -> list[str]:
        listed = list(messages)
        asked.extend(message.metadata.dst_node_id for message in listed)
        return list(push(listed))

    grid.push_messages = noted  # type: ignore[assignment, method-assign]
    return grid


def test_samples_on_the_server_are_asked_for() -> None:
    with pytest.raises(UserError, match=r"CDFL measures models .* start\(probe=...\)"):
        STRATEGIES["cdfl"]().start(grid_of(numpy_app()), initial_numpy())


def test_the_pytorch_quickstart_splits_and_its_models_load(lines: list[str]) -> None:
    loaded: list[int] = []

    def central(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = load_net(arrays)
        loaded.append(server_round)
        return MetricRecord({"norm": float(net.fc1.weight.detach().norm())})

    strategy = CASA(fraction_train=0.5, gamma=0.05)
    result = strategy.start(
        grid_of(torch_app()),
        initial_net(),
        num_rounds=8,
        train_config=CONFIG,
        evaluate_fn=central,
    )
    assert strategy.progress.updates == 8 * 5
    assert len(result.clusters) > 1
    # No cluster has clients with both kinds of labels.
    for cluster in result.clusters:
        odd = {int(c[-1]) % 2 for c, where in result.client_clusters.items() if cluster in where}
        assert len(odd) == 1
    assert loaded.count(0) == 1
    assert loaded.count(8) == len(result.clusters)
    by_cluster = result.evaluate_metrics_clusters[8]
    assert by_cluster.keys() == result.clusters.keys()
    sizes = {k: sum(k in where for where in result.client_clusters.values()) for k in by_cluster}
    mean = sum(sizes[k] * float(by_cluster[k]["norm"]) for k in by_cluster) / 10
    assert result.evaluate_metrics_serverapp[8]["norm"] == pytest.approx(mean)
    for arrays in (result.arrays, *result.clusters.values()):
        load_net(arrays)
    assert result.evaluate_metrics_clientapp[8]["eval_acc"] > 0.9
    assert (
        sizes[max(sizes, key=lambda k: sizes[k])]
        == sizes[next(k for k, arrays in result.clusters.items() if arrays is result.arrays)]
    )
    told = "\n".join(lines)
    assert "Starting CASA: Number of rounds: 8, a model of 0.00 MB" in told
    assert "fraction_train: 0.5" in told
    assert "alpha0=2.0" in told
    assert "Accuracy is 'eval_acc', loss is 'eval_loss'" in told
    assert re.findall(r"Round (\d)/8: (\d) updates of", told) == [
        (str(number), "5") for number in range(1, 9)
    ]
    assert re.search(r"Cluster 0 → clusters 1 \(\d\), 2 \(\d\) at update \d+", told)
    assert re.search(
        r"Round 8/8 tested by 10 of 10 clients: eval_loss 0\.\d+, eval_acc 0\.\d+", told
    )
    assert re.search(r"accuracy by cluster \(clients\): \d: \d\.\d{3} \(\d\)", told)
    assert "The initial model tested on the server: norm" in told
    assert re.search(r"Clusters \(clients\): ", told)
    # In virtual seconds, like the rounds.
    rounds = [float(each) for each in re.findall(r"clients in (\d+\.\d) virtual s", told)]
    (ended,) = re.findall(r"Finished after (\d+\.\d) virtual s", told)
    assert len(rounds) == 8
    assert float(ended) >= sum(rounds) - 0.5 > 1.0


def test_the_scikit_learn_quickstart_runs(lines: list[str]) -> None:
    result = FedBuff(k=2).start(grid_of(sklearn_app()), initial_regression(), num_rounds=3)
    coefficients, intercept = result.arrays.to_numpy_ndarrays()
    assert coefficients.shape == (CLASSES, INPUTS)
    assert coefficients.dtype == intercept.dtype == np.float64
    assert np.abs(coefficients).max() > 0.01
    assert any("Accuracy is 'accuracy', loss is not stated" in line for line in lines)
    assert result.evaluate_metrics_clientapp[3].keys() == {"accuracy", "test_logloss"}


def test_without_an_accuracy_the_loss_is_what_is_charted(lines: list[str], tmp_path: Path) -> None:
    with RunStore(tmp_path) as store:
        CASA().start(grid_of(numpy_app()), initial_numpy(), num_rounds=2, observe=store.observe)
    record = RunRecord.of(read_events(tmp_path))
    assert record.measure.name == "loss"
    assert len(record.evaluations.accuracy) == 2
    assert list(record.evaluations.accuracy) == list(record.evaluations.loss)
    axes = accuracy_figure(record).axes[0]
    assert axes.get_ylabel() == "loss"
    assert axes.get_ylim()[1] > 1
    assert any("the loss 'loss' is charted" in line for line in lines)


def test_another_metric_is_the_accuracy_if_the_user_says_so() -> None:
    seen: list[events.Event] = []
    CASA(accuracy_key="eval_loss").start(
        grid_of(torch_app(), nodes=3), initial_net(), 1, train_config=CONFIG, observe=seen.append
    )
    (report,) = (event for event in seen if isinstance(event, events.Evaluated))
    assert report.measure.name == "accuracy"
    assert report.accuracy == pytest.approx(report.loss)


def test_messages_have_the_settings_of_flowers_own_strategies() -> None:
    """User functions see no additional record or setting."""
    sent: list[tuple[str, list[str], dict]] = []
    grid = grid_of(numpy_app(), nodes=2)
    push = grid.push_messages

    def noted(messages: list[Message]) -> list[str]:
        listed = list(messages)
        for message in listed:
            config = dict(message.content["settings"])
            sent.append((message.metadata.message_type, sorted(message.content), config))
        return list(push(listed))

    grid.push_messages = noted  # type: ignore[assignment, method-assign]
    app_config = ConfigRecord({"lr": 0.1})
    with pytest.raises(UserError, match="None of 6 replies could be used"):
        # The app reads "arrays", so it raises if the record has another name.
        CASA(arrayrecord_key="weights", configrecord_key="settings").start(
            grid, initial_numpy(), num_rounds=1, train_config=app_config
        )
    assert {kind for kind, _, _ in sent} == {"train"}
    assert all(records == ["settings", "weights"] for _, records, _ in sent)
    assert all(config == {"lr": 0.1, "server-round": 1} for _, _, config in sent)


@pytest.mark.filterwarnings("ignore")
def test_a_client_is_sent_one_model_and_nothing_beside_it() -> None:
    """Client mods refuse messages with several ArrayRecords, such as CASA+'s masks."""
    sent: set[tuple[str, ...]] = set()
    grid = grid_of(torch_app())
    push = grid.push_messages

    def noted(messages: list[Message]) -> list[str]:
        listed = list(messages)
        sent.update(tuple(sorted(message.content)) for message in listed)
        return list(push(listed))

    grid.push_messages = noted  # type: ignore[assignment, method-assign]
    strategy = STRATEGIES["casa-plus"]()
    strategy.start(grid, initial_net(), num_rounds=3, train_config=CONFIG)
    assert strategy.state.masks
    assert sent == {("arrays", "config")}


def test_metrics_are_aggregated_as_the_user_says() -> None:
    rounds: list[tuple[int, str, int]] = []

    def most(contents: list[RecordDict], key: str) -> MetricRecord:
        rounds.append((len(contents), key, len(contents[0].array_records)))
        return MetricRecord({"most": max(float(c["metrics"]["num-examples"]) for c in contents)})

    result = CASA(train_metrics_aggr_fn=most, evaluate_metrics_aggr_fn=most).start(
        grid_of(numpy_app(), nodes=4), initial_numpy(), num_rounds=2
    )
    assert result.train_metrics_clientapp == {1: {"most": 10.0}, 2: {"most": 10.0}}
    assert result.evaluate_metrics_clientapp == {1: {"most": 10.0}, 2: {"most": 10.0}}
    assert sorted(rounds) == [(4, "num-examples", 0)] * 2 + [(4, "num-examples", 1)] * 2


def test_a_share_of_the_nodes_trains_and_tests() -> None:
    seen: list[events.Event] = []
    strategy = CASA(fraction_train=0.3, fraction_evaluate=0.2, min_evaluate_nodes=3)
    strategy.start(grid_of(numpy_app()), initial_numpy(), num_rounds=4, observe=seen.append)
    assert strategy.progress.updates == 4 * 3
    assert [e.asked for e in seen if isinstance(e, events.Evaluated)] == [3] * 4
    seen.clear()
    in_rounds = CFL(fraction_train=0.1, min_train_nodes=4, fraction_evaluate=0)
    result = in_rounds.start(
        grid_of(numpy_app()), initial_numpy(), num_rounds=2, observe=seen.append
    )
    assert in_rounds.progress.updates == 2 * 4
    assert not result.evaluate_metrics_clientapp
    assert not [e for e in seen if isinstance(e, events.Evaluated)]
    flowers = FedAvg(fraction_train=0.1, min_train_nodes=4)
    flowers.start(grid_of(numpy_app()), initial_numpy(), num_rounds=2)
    assert flowers.progress.updates == 2 * 4


@pytest.mark.parametrize("name", ["casa", "fedavg", "csafl"])
def test_models_are_tested_when_a_round_is_over(name: str) -> None:
    """Server and clients test the models of a round before the next one begins."""
    strategy, seen = STRATEGIES[name](), []
    centrally: list[tuple[int, int]] = []

    def central(server_round: int, arrays: ArrayRecord) -> None:
        centrally.append((server_round, strategy.progress.updates))

    strategy.start(
        *(grid_of(numpy_app(), nodes=5), initial_numpy()),
        num_rounds=3,
        evaluate_fn=central,
        observe=seen.append,
    )
    by_clients = [event.updates for event in seen if isinstance(event, events.Evaluated)]
    ends = sorted(set(centrally))
    assert [number for number, _ in ends] == [0, 1, 2, 3]
    assert [updates for _, updates in ends][1:] == by_clients
    if name != "csafl":
        assert ends == [(0, 0), (1, 5), (2, 10), (3, 15)]


@pytest.mark.parametrize("name", ["casa", "fedavg", "fedasync"])
def test_should_stop_ends_a_run_after_a_round_and_its_evaluation(name: str) -> None:
    """Flower 1.43 calls it with the number of the round and the result so far."""
    asked: list[tuple[int, list[int], list[int]]] = []

    def should_stop(server_round: int, result: Result) -> bool:
        trained, tested = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
        asked.append((server_round, list(trained), list(tested)))
        assert result.arrays.to_numpy_ndarrays()[0].shape == (3, 3)
        return server_round == 2

    strategy, seen = STRATEGIES[name](), list[events.Event]()
    result = strategy.start(
        grid_of(numpy_app(), nodes=5),
        initial_numpy(),
        num_rounds=6,
        should_stop=should_stop,
        observe=seen.append,
    )
    assert asked == [(1, [1], [1]), (2, [1, 2], [1, 2])]
    assert strategy.progress.updates == 2 * 5
    assert list(result.evaluate_metrics_clientapp) == [1, 2]
    assert isinstance(seen[-1], events.RunEnded)
    assert seen[-1].reason == "should_stop ended the run after round 2"


def test_updates_are_counted_by_those_who_wish() -> None:
    strategy = CASA()
    result = strategy.start(grid_of(numpy_app()), initial_numpy(), max_updates=13)
    assert strategy.progress.updates == 13
    assert list(result.evaluate_metrics_clientapp) == [1, 2]
    again = strategy.start(grid_of(numpy_app()), initial_numpy(), max_updates=5)
    assert strategy.progress.updates == 18
    assert list(again.evaluate_metrics_clientapp) == [1]


def test_clients_that_do_not_test_are_not_asked_again(lines: list[str]) -> None:
    tested: list[int] = []
    app = ClientApp()
    stock = numpy_app()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return stock(msg, context)

    grid = grid_of(app)
    send = grid.send_and_receive

    def noted(messages: list[Message], **options: float) -> list[Message]:
        listed = list(messages)
        tested.extend(message.metadata.dst_node_id for message in listed)
        return list(send(listed, **options))

    grid.send_and_receive = noted  # type: ignore[assignment, method-assign]
    result = CASA().start(grid, initial_numpy(), num_rounds=3)
    assert len(tested) == 10
    assert not result.evaluate_metrics_clientapp
    assert not any("Traceback" in line for line in lines)


def numpy_app_with(evaluate: Callable[[Message, Context], Message]) -> ClientApp:
    """The quickstart's app with another evaluation function."""
    app, stock = ClientApp(), numpy_app()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return stock(msg, context)

    app.evaluate()(evaluate)
    return app


@pytest.mark.parametrize("name", ["fedavg", "casa"])
def test_a_test_is_of_the_round_that_is_over(name: str) -> None:
    def evaluate(msg: Message, context: Context) -> Message:
        told = MetricRecord({"round": msg.content["config"]["server-round"], "num-examples": 1})
        return Message(RecordDict({"metrics": told}), reply_to=msg)

    result = STRATEGIES[name]().start(
        grid_of(numpy_app_with(evaluate)), initial_numpy(), num_rounds=3
    )
    rounds = {number: told["round"] for number, told in result.evaluate_metrics_clientapp.items()}
    assert rounds == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize("raises", [True, False])
def test_a_test_that_fails_is_reported_once_for_each_client(raises: bool, lines: list[str]) -> None:
    def evaluate(msg: Message, context: Context) -> Message:
        if raises:
            raise ValueError("no test data")
        return Message(RecordDict(), reply_to=msg)

    grid = grid_of(numpy_app_with(evaluate), nodes=3)
    result = FedAvg().start(grid, initial_numpy(), num_rounds=2)
    assert not result.evaluate_metrics_clientapp
    told = [line for line in lines if line.startswith("The evaluation of node-")]
    reason = "no test data" if raises else "it returns 0 MetricRecords, not 1"
    assert len(told) == 3
    assert all(line.endswith(reason) for line in told)


@pytest.mark.parametrize("timeout", [None, 0, -1.0, "60"])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    with pytest.raises(UserError, match="timeout must be seconds above 0, got "):
        CASA().start(grid_of(numpy_app()), initial_numpy(), timeout=timeout)


def test_an_app_that_cannot_train_is_reported() -> None:
    with pytest.raises(UserError, match=r"cannot train: .* @app.train\(\)"):
        CASA().start(grid_of(ClientApp()), initial_numpy())


@pytest.mark.parametrize("name", ["casa", "fedavg", "cfl-async"])
def test_client_mods(name: str) -> None:
    for mod, config in (
        (LocalDpMod(1.0, 0.1, 5.0, 1e-5), {}),
        (fixedclipping_mod, {"clipping_norm": 0.5}),
    ):
        app = ClientApp()
        stock = torch_app()
        app.train(mods=[mod])(stock)
        app.evaluate()(stock)
        seen: list[events.Event] = []
        result = STRATEGIES[name]().start(
            grid_of(app, nodes=4),
            initial_net(),
            num_rounds=2,
            train_config=ConfigRecord({"lr": 0.1, **config}),
            observe=seen.append,
        )
        load_net(result.arrays)
        assert not [event for event in seen if isinstance(event, events.UpdateRejected)]


def test_the_network_of_the_tests_has_whole_numbers_among_its_buffers() -> None:
    assert Net().state_dict()["bn1.num_batches_tracked"].dtype.is_floating_point is False


def test_what_raceme_logs_is_seen_with_flowers_lines(lines: list[str]) -> None:
    def spoil(reply: Message, context: Context) -> None:
        if context.node_id == 1000:
            raise RuntimeError("no disk")

    FedBuff().start(grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=2)
    said = re.compile(r"The update of node-1000 was rejected: error \d+: .*no disk")
    assert any(said.match(line) for line in lines)
    assert any("the run has 6: the model will not" in line for line in lines)
    logger = logging.getLogger("raceme")
    assert not logger.handlers
    assert logger.propagate


def test_the_page_says_what_the_error_says() -> None:
    page = (ROOT / "docs" / "flower-users.md").read_text(encoding="utf-8")
    snippet = textwrap.dedent(SNIPPET).strip()
    assert snippet in re.sub(r"\n\n+", "\n\n", page)
    methods = page[page.index("## Which methods") : page.index("Other ClientApps are refused")]
    any_app, others = methods.split("The others ask")
    for name in (*NEEDS_KINDS, *STOCK):
        if name in (*CSAFL_VARIANTS, "casa-c", "casa-d"):
            continue
        assert SPOKEN.get(name, name) in (others if name in NEEDS_KINDS else any_app).lower(), name


def test_an_unsupported_use_is_one_line_of_flowers_log(lines: list[str]) -> None:
    """Like Flower's runtime, which logs the exception and an exit code without details."""
    trees = ArrayRecord([np.frombuffer(b"a tree", np.uint8)])
    flower = logging.getLogger("flwr")
    with pytest.raises(UserError) as raised:
        CASA().start(grid_of(numpy_app()), trees)
    lines.clear()
    with_traceback: list[bool] = []
    flower.handlers[-1].addFilter(lambda record: with_traceback.append(bool(record.exc_info)) or 1)
    flower.error("%s raised an exception", "ServerApp", exc_info=raised.value)
    flower.error("Exit Code: 700\nAn unhandled exception occurred")
    assert lines == [str(raised.value)]
    assert with_traceback == [False]
    # Other errors keep their traceback.
    flower.error("%s raised an exception", "ServerApp", exc_info=ValueError("another"))
    assert with_traceback == [False, True]
