"""From journals to MLflow: runs, their parents, and what belongs to them.

Everything here may be done twice: a process that is killed between sending and noting it sends the
same again, and MLflow has it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hamlet.tracking.journal import Journal, Sent
from hamlet.tracking.processes import is_dead
from hamlet.tracking.store import experiment_id, log_file, tracking_lock

EXECUTION, STAGE, KEY = "hamlet.execution", "hamlet.stage", "hamlet.key"
PARENT = "mlflow.parentRunId"
BATCH = 1000  # metrics in one call; of params and tags MLflow takes a hundred


def deliver(journal: Journal, mlflow_client: Any, beat: Callable[[], None]) -> Sent:
    """Send what MLflow lacks of a journal. `beat` is called after every call that was answered.

    Raises:
        Exception: whatever MLflow, SQLite or the network say; what was sent is noted.
    """
    from mlflow.exceptions import MlflowException

    sent = journal.sent()
    try:
        _Delivery(journal, sent, mlflow_client, beat).all()
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST" or sent.run_id is None:
            raise
        sent = Sent()  # another database stands there now: it gets everything
        _Delivery(journal, sent, mlflow_client, beat).all()
    return sent


def bury(journal: Journal, sent: Sent, mlflow_client: Any) -> None:
    """End the run of a process that was killed and could not do it itself."""
    if not journal.ended and sent.run_id is not None:
        with tracking_lock():
            mlflow_client.set_terminated(sent.run_id, "KILLED")
            settle_parent(mlflow_client, sent.experiment_id, sent.parent_id)
        sent.buried = True
        journal.save(sent)


class _Delivery:
    def __init__(
        self, journal: Journal, sent: Sent, mlflow_client: Any, beat: Callable[[], None]
    ) -> None:
        self.journal, self.sent, self.client, self.beat = journal, sent, mlflow_client, beat

    def all(self) -> None:
        metrics: list[list[Any]] = []
        begun = self.sent.offset
        for event, offset in self.journal.events(begun):
            (kind, value), *_ = event.items()
            if kind == "metrics":
                metrics += value
            if kind != "metrics" or len(metrics) >= BATCH:
                self._metrics(metrics)
                metrics = []
            if kind != "metrics":
                getattr(self, f"_{kind}")(value)
            self.sent.offset = offset
            if not metrics:
                self.journal.save(self.sent)
                self.beat()
        if metrics:
            self._metrics(metrics)
            self.journal.save(self.sent)
            self.beat()

    def _metrics(self, rows: list[list[Any]]) -> None:
        from mlflow.entities import Metric

        for i in range(0, len(rows), BATCH):
            batch = [Metric(*row) for row in rows[i : i + BATCH]]
            self.client.log_batch(self.sent.run_id, metrics=batch)

    def _open(self, header: Mapping[str, Any]) -> None:
        with tracking_lock():
            self.sent.experiment_id = experiment_id(self.client)
            found = self._find(KEY, header["key"])
            parent = self._parent(header["execution"])
            tags = {**header["tags"], PARENT: parent, STAGE: header["stage"], KEY: header["key"]}
            if found is None:
                found = self.client.create_run(
                    self.sent.experiment_id, header["started"], tags, run_name=header["stage"]
                )
            self.client.update_run(parent, status="RUNNING")
        self.sent.run_id, self.sent.parent_id = found.info.run_id, parent
        self._params(header["params"])
        self._inputs(header["inputs"])

    def _resume(self, header: Mapping[str, Any]) -> None:
        """The same run, of the execution that goes on with it; the one that was cut off is that."""
        execution = header["execution"]
        with tracking_lock():
            before = self.client.get_run(self.sent.parent_id).data.tags.get(EXECUTION, "")
            parent = self._find(EXECUTION, execution["key"])
            if parent is None and is_dead(before):
                self.client.set_tag(self.sent.parent_id, EXECUTION, execution["key"])
            else:
                self.sent.parent_id = self._parent(execution)
            self.client.update_run(self.sent.parent_id, status="RUNNING")
            self.client.update_run(self.sent.run_id, status="RUNNING")
            if "hamlet.reason" in self.client.get_run(self.sent.run_id).data.tags:
                self.client.delete_tag(self.sent.run_id, "hamlet.reason")
        left = self.client.get_run(self.sent.run_id).data.tags[PARENT]
        self._set_tags(self.sent.run_id, {**header["tags"], PARENT: self.sent.parent_id})
        self._set_tags(self.sent.parent_id, execution["tags"])
        if left != self.sent.parent_id:
            settle_parent(self.client, self.sent.experiment_id, left)
        self.sent.buried = False

    def _parent(self, execution: Mapping[str, Any]) -> str:
        found = self._find(EXECUTION, execution["key"])
        if found is None:
            tags = {**execution["tags"], EXECUTION: execution["key"]}
            found = self.client.create_run(
                self.sent.experiment_id, execution["started"], tags, run_name=execution["name"]
            )
        self._set_params(found.info.run_id, execution["params"])
        return found.info.run_id

    def _find(self, tag: str, value: str) -> Any:
        return find_run(self.client, self.sent.experiment_id, tag, value)

    def _params(self, values: Mapping[str, str]) -> None:
        self._set_params(self.sent.run_id, values)

    def _tags(self, values: Mapping[str, str]) -> None:
        self._set_tags(self.sent.run_id, values)

    def _work(self, name: str) -> None:
        pass  # for who goes on with this run

    def _file(self, value: list[str | None]) -> None:
        path, folder = value
        if (self.journal.folder / str(path)).exists():
            log_file(self.client, str(self.sent.run_id), self.journal.folder / str(path), folder)

    def _inputs(self, values: list[Mapping[str, str]]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        given = [
            DatasetInput(
                Dataset(d["name"], d["digest"], d["source_type"], d["source"]),
                [InputTag("mlflow.data.context", d["context"])],
            )
            for d in values
        ]
        if given:
            for run_id in (self.sent.run_id, self.sent.parent_id):
                self.client.log_inputs(run_id, given)

    def _execution(self, values: Mapping[str, Any]) -> None:
        """Facts of the whole execution, for its own row."""
        from mlflow.entities import Metric

        metrics = [Metric(*row) for row in values["metrics"]]
        if metrics:
            self.client.log_batch(self.sent.parent_id, metrics=metrics)
        self._set_tags(self.sent.parent_id, values["tags"])

    def _links(self, values: Mapping[str, Mapping[str, str | None]]) -> None:
        """The run behind every result, also of the stages that this execution did not run."""
        tags = {}
        for stage, made in values.items():
            run_id = made.get("run_id")
            if run_id is None and (key := made.get("key")):
                found = self._find(KEY, key)
                run_id = found.info.run_id if found else None
            tags[f"hamlet.run.{stage}"] = str(run_id)
        self._set_tags(self.sent.parent_id, tags)

    def _end(self, value: tuple[str, int, float]) -> None:
        status, at, _ = value
        with tracking_lock():
            self.client.set_terminated(self.sent.run_id, status, at)
            settle_parent(self.client, self.sent.experiment_id, self.sent.parent_id, at)

    def _set_tags(self, run_id: str | None, values: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(key, str(value)) for key, value in values.items()]
        for i in range(0, len(tags), 100):
            self.client.log_batch(run_id, tags=tags[i : i + 100])

    def _set_params(self, run_id: str | None, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        has = self.client.get_run(run_id).data.params if values else {}
        params = [Param(key, value) for key, value in values.items() if key not in has]
        for i in range(0, len(params), 100):
            self.client.log_batch(run_id, params=params[i : i + 100])


def find_run(mlflow_client: Any, experiment: str | None, tag: str, value: str) -> Any:
    """The run with a tag of this value, or None."""
    found = mlflow_client.search_runs([experiment], f"tags.`{tag}` = '{value}'", max_results=1)
    return found[0] if found else None


def settle_parent(
    mlflow_client: Any, experiment: str | None, parent: str | None, at: int | None = None
) -> None:
    """Give a parent the worst status among its stages' last runs, and the sum of their seconds."""
    where = f"tags.`{PARENT}` = '{parent}'"
    order = ["attributes.start_time ASC"]
    children = mlflow_client.search_runs([experiment], where, order_by=order)
    last = {child.data.tags.get(STAGE): child for child in children}
    statuses = {child.info.status for child in last.values()}
    status = next((s for s in ("RUNNING", "FAILED", "KILLED") if s in statuses), "FINISHED")
    seconds = sum(child.data.metrics.get("seconds", 0.0) for child in last.values())
    mlflow_client.log_metric(parent, "seconds", seconds)
    if status == "RUNNING":
        mlflow_client.update_run(parent, status=status)
    else:
        mlflow_client.set_terminated(parent, status, at)
