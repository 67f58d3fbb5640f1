"""What the verbs that people and housekeepers call must do: dead letters, waiting for a task, duties, endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.model_state import State


class Administration(State):
    def redrive(self, ids: Sequence[str]) -> list[str]:
        replies = []
        for task in map(self.tasks.get, ids):
            if task is None:
                word = "unknown"
            elif task.outcome == "ok":
                word = "done"
            elif not task.outcome or task.lease:
                word = "unsettled"
            else:
                word = "queued"
                self.registries["failed"].pop(task.id, None)
                self.registries["canceled"].pop(task.id, None)
                task.outcome = task.why = task.answer = ""
                task.attempts = task.lost = task.deadline = task.ended = 0
                task.excluded, task.body, task.suspect = (), b"", False
                if task.idem and self.idem.get(task.idem, (task.id, ""))[0] == task.id:
                    self.idem[task.idem], self.idem_days[task.idem] = (task.id, task.digest), 14
                self._make_ready(task)
                self.counters["n_redriven"] += 1
            replies.append(word)
        if "queued" in replies:
            self._announce()
        return replies

    def purge(self, ids: Sequence[str]) -> list[str]:
        replies = []
        for task_id in ids:
            task = self.tasks.get(task_id)
            word = "unknown" if task is None else "purged" if task.outcome and not task.lease else "unsettled"
            if task is not None and word == "purged":
                for registry in self.registries.values():
                    registry.pop(task_id, None)
                if self.idem.get(task.idem, ("", ""))[0] == task_id:
                    del self.idem[task.idem], self.idem_days[task.idem]
                del self.tasks[task_id]
            replies.append(word)
        return replies

    def watch(self, reply: str, ids: Sequence[str]) -> list[str]:
        words = []
        for task in map(self.tasks.get, ids):
            if task is None:
                words.append("unknown")
            elif task.outcome:
                words.append("settled")
            else:
                names = [name for name in task.reply.split(",") if name]
                task.reply = ",".join([*names, *([] if reply in names else [reply])])
                words.append("watching")
        return words

    def ticket(self, duty: str, process: str, again: bool) -> bool:
        if duty not in self.tickets:
            self.tickets[duty] = process
            return True
        return again and self.tickets[duty] == process

    def health(self, name: str, ok: bool) -> str:
        endpoint = self.pool.endpoints.get(name)
        if endpoint is None:
            return "unknown"
        was, endpoint.healthy, endpoint.checked = endpoint.healthy, ok, self.now
        if ok:
            if was is False:
                self._recover(endpoint)
            if not was:
                self._announce()
            return "recovered" if was is False else "same"
        return {None: "down", False: "same", True: "failed"}[was]

    def drain(self, name: str, on: bool) -> str:
        if name not in self.pool.endpoints:
            return "unknown"
        self.pool.endpoints[name].drain = on
        self._announce()
        return "done"

    def reset(self, name: str) -> str:
        endpoint = self.pool.endpoints.get(name)
        if endpoint is None:
            return "unknown"
        self._close(endpoint)
        self.events.pop()  # who resets knows
        endpoint.pause, endpoint.healthy, endpoint.checked = 0, None, 0
        endpoint.ramp, endpoint.ramp_ok = None, 0
        self.rates.pop(name, None)
        self._announce()
        return "done"
