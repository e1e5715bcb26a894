"""Scenarios about workers: stalls, takeovers while one runs a task of a lane, two tasks of one id."""

from typing import Final

from mainspring.model.delivery import DONE, Done, Retry
from mainspring.model.ids import idempotency_key
from mainspring.model.job import End, Job
from mainspring.store import job_queue
from mainspring.testing.faults import bad_road, calls
from mainspring.testing.history import BegunEvent, FinishedAs, FinishedEvent

from .owners import STALL_MS
from .world import RETRY_MS, World, on_the_way

TARGET: Final = "queue:work/run"
LANE: Final = "lane"


class WorkerByHand:
    """A worker that takes and ends on request; its begins and ends are part of the history."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name

    async def take(self) -> list[Job]:
        return self._begun(await job_queue.take(self._world.store, self.name, {0: {"work": 10}}))

    async def reclaim(self) -> list[Job]:
        """Take over jobs of others as if their leases had expired: leases count on the server's own clock."""
        return self._begun(await job_queue.reclaim(self._world.store, self.name, {0: {"work": 10}}, lease_ms=0))

    async def end(self, jobs: list[Job], outcome: Done | Retry = DONE) -> list[job_queue.FinishAnswer]:
        answers = await job_queue.finish(self._world.store, [End(job, outcome) for job in jobs])
        for job, answer in zip(jobs, answers, strict=True):
            if answer == "ok":
                ending: FinishedAs = "done" if isinstance(outcome, Done) else "retry"
                at_us = self._world.now_us()
                event = FinishedEvent(at_us, job.id, self._key(job), job.body.attempt, ending, job.partition, "")
                self._world.history.events.append(event)
        return answers

    def _begun(self, jobs: list[Job]) -> list[Job]:
        for job in jobs:
            at_us = self._world.now_us()
            event = BegunEvent(at_us, job.id, self._key(job), job.body.attempt, job.partition, "", self.name)
            self._world.history.events.append(event)
        return jobs

    def _key(self, job: Job) -> str:
        return idempotency_key(self._world.namespace, job.id, job.original_due_ms, job.body.key_lane)


async def stalled_worker_ends_its_run(world: World) -> None:
    """A worker is suspended for longer than its lease; another one has run its task by the time it wakes up."""
    node, caller = await world.node("a", workers=True), world.caller
    first, second = WorkerByHand(world, "w1"), WorkerByHand(world, "w2")
    await caller.put(world.at(1_000), target=TARGET)
    await node.until(world, 1_000)
    jobs = await first.take()
    world.failed("a worker stalled", node="w1")
    again = await second.reclaim()
    await first.end(jobs, Retry("too long", after_ms=RETRY_MS))
    await second.end(again)
    await node.until(world, 1_000 + RETRY_MS)
    await second.end(await second.take())
    await world.settle(node)


async def run_of_a_dead_worker(world: World) -> None:
    """A worker dies; another one runs its task and ends it, and a third finds nothing left to take over."""
    node, caller = await world.node("a", workers=True), world.caller
    second, third = WorkerByHand(world, "w2"), WorkerByHand(world, "w3")
    await caller.put(world.at(1_000), target=TARGET)
    await node.until(world, 1_000)
    await WorkerByHand(world, "w1").take()
    world.failed("a worker died", node="w1")
    await second.end(await second.reclaim())
    await third.end(await third.reclaim())
    await world.settle(node)


async def lane_at_a_worker_at_a_takeover(world: World) -> None:
    """The owner dies while a worker runs the head of a lane, which continues undisturbed."""
    first, caller, worker = await world.node("a", workers=True), world.caller, WorkerByHand(world, "w1")
    await caller.put(world.at(1_000), lane=LANE, target=TARGET)
    await caller.put(world.at(2_000), lane=LANE, target=TARGET)
    await first.until(world, 1_000)
    jobs = await worker.take()
    await first.crash()
    world.failed("a node died", node="a")
    world.go_to(1_000 + STALL_MS)
    second = await world.node("b", workers=True)
    await second.turn()
    await worker.take()
    await worker.end(jobs)
    await second.until(world, 1_001 + STALL_MS)
    await worker.end(await worker.take())
    await world.settle(second)


async def lane_through_workers(world: World) -> None:
    """Two tasks of a lane are due; the first runs for a while."""
    node, caller = await world.node("a", workers=True), world.caller
    worker, other = WorkerByHand(world, "w1"), WorkerByHand(world, "w2")
    await caller.put(world.at(1_000), lane=LANE, target=TARGET)
    await caller.put(world.at(1_500), lane=LANE, target=TARGET)
    await node.until(world, 1_000)
    jobs = await worker.take()
    await node.until(world, 1_500, 2_000)
    early = await other.take()
    await worker.end(jobs)
    await node.until(world, 2_500)
    await other.end([*early, *await other.take()])
    await world.settle(node)


async def finished_work_at_a_hand_over(world: World) -> None:
    """A task was handed off, run and ended; then its partition gets another owner."""
    first, caller, worker = await world.node("a", workers=True), world.caller, WorkerByHand(world, "w1")
    await caller.put(world.at(1_000), target=TARGET)
    await caller.put(world.at(1_900), target=TARGET)
    await first.until(world, 1_000)
    await worker.end(await worker.take())
    await first.stop()
    second = await world.node("b", workers=True)
    await second.until(world, 1_100)
    await worker.end(await worker.take())
    await second.until(world, 1_900)
    await worker.end(await worker.take())
    await world.settle(second)


async def two_tasks_of_one_id(world: World) -> None:
    """A task gets the id of one that a worker is running."""
    node, worker = await world.node("a", workers=True), WorkerByHand(world, "w1")
    running: list[list[Job]] = []
    for after_ms in (1_000, 2_000):
        at_ms = world.at(after_ms)
        handle = await world.caller.client.put(TARGET, at=at_ms, id="one", on_conflict="replace")
        world.history.accepted(handle.id, at_ms, world.now_us())
        await node.until(world, after_ms)
        running.append(await worker.take())
    jobs, early = running
    await worker.end(jobs)
    await node.until(world, 3_000)
    await worker.end([*early, *await worker.take()])
    await world.settle(node)


async def id_of_a_task_that_waits_in_its_queue(world: World) -> None:
    """No worker comes for longer than the dedupe window; then the caller repeats its request."""
    node, caller, worker = await world.node("a", workers=True), world.caller, WorkerByHand(world, "w1")
    await caller.put(world.at(1_000), target=TARGET, id="one")
    hours_ms = 2 * node.engine.store.shared.dedupe_window_ms
    await node.until(world, 1_000, 10_000, hours_ms)
    while await node.engine.sweeper.step() == 0.0:
        pass
    await caller.put(world.at(hours_ms + 1_000), target=TARGET, id="one")
    for moment_ms in (hours_ms + 1_000, hours_ms + 2_000, hours_ms + 3_000):
        await node.until(world, moment_ms)
        await worker.end(await worker.take())
    await world.settle(node)


async def failure_just_before_a_hand_off(world: World) -> None:
    """A task is to be handed off. Just before, while a retry is written, another delivery of its slice fails; then the
    node dies."""
    first, caller, worker = await world.node("a", workers=True), world.caller, WorkerByHand(world, "w1")
    gate = first.hold(Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_200))
    await caller.put(world.at(1_500), target=TARGET)
    await first.read()
    world.go_to(1_000)
    await first.fire()
    first.answers(Retry("busy"))
    world.go_to(1_200)
    await first.fire()
    world.go_to(1_500)
    with on_the_way(first.store, calls("commit"), after=first.failing(gate)):
        await first.fire()
    await first.crash()
    world.failed("a node died", node="a")
    second = await world.node("b", workers=True)
    await second.until(world, 1_500 + STALL_MS)
    await worker.end(await worker.take())
    await world.settle(second)


async def failure_while_a_stop_hands_off(world: World) -> None:
    """A node that stops hears late that a task has begun, and hands it off; meanwhile another delivery of its slice
    fails. Then the node dies."""
    first, caller, worker = await world.node("a", workers=True), world.caller, WorkerByHand(world, "w1")
    gate = first.hold(Retry("busy"))
    await caller.put(world.at(1_000))
    await caller.put(world.at(1_500), target=TARGET)
    await first.read()
    world.go_to(1_000)
    await first.fire()
    world.go_to(1_500)
    with bad_road(first.store) as road:
        road.next("lose reply", only=calls("tick"))
        await first.fire()
    with on_the_way(first.store, calls("commit"), after=first.failing(gate)):
        await first.commit()
    await first.crash()
    world.failed("a node died", node="a")
    second = await world.node("b", workers=True)
    await second.until(world, 1_500 + STALL_MS)
    await worker.end(await worker.take())
    await world.settle(second)


async def failover_loses_a_hand_off(world: World) -> None:
    """A replica takes over that knows neither of a hand-off nor of the run that followed it."""
    node, caller, worker = await world.node("a", workers=True), world.caller, WorkerByHand(world, "w1")
    await caller.put(world.at(1_000), target=TARGET)
    await caller.put(world.at(1_000), target=TARGET, lane=LANE)
    await caller.put(world.at(1_500), target=TARGET, lane=LANE)
    await node.read()
    replica = await world.keep()
    await node.until(world, 1_000)
    jobs = await worker.take()
    await worker.end(jobs[:1])
    await world.fall_back(replica)
    world.failed("a failover lost writes", loses=True)
    await worker.end(jobs[1:])
    for moment_ms in (1_500, 2_000, 2_500):
        await node.until(world, moment_ms)
        await worker.end(await worker.take())
    await world.settle(node)


QUEUES: Final = (
    stalled_worker_ends_its_run,
    run_of_a_dead_worker,
    lane_at_a_worker_at_a_takeover,
    lane_through_workers,
    finished_work_at_a_hand_over,
    two_tasks_of_one_id,
    id_of_a_task_that_waits_in_its_queue,
    failure_just_before_a_hand_off,
    failure_while_a_stop_hands_off,
    failover_loses_a_hand_off,
)
