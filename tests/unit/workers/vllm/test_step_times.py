"""The speed of a server, by when the tokens of its requests come."""

from dataclasses import dataclass
from itertools import count
from random import Random

import pytest

from tidemill.workers.messages import Speed
from tidemill.workers.vllm.step_times import SAMPLE_S_MAX, StepTimes

TRUE = Speed(step_s=0.03, token_s=7e-4, row_s=5e-3)
STEP_TOKENS = 2048


@dataclass(eq=False)
class Running:
    left: int  # of its prompt
    answer: int
    reads: bool = True


class Server:
    """Computes prompts in order, 2,048 tokens in a step, beside the answers."""

    def __init__(self, seed: int) -> None:
        self.now_s = 5.0
        self.times = StepTimes()
        self.running: list[Running] = []
        self._rng = Random(seed)

    def ask(self, prompt_tokens: int) -> None:
        request = Running(prompt_tokens, self._rng.randrange(1, 40))
        self.running.append(request)
        self.times.begin(request, prompt_tokens, self.now_s)

    def leave(self, request: Running) -> None:
        self.running.remove(request)
        self.times.end(request)

    def step(self) -> None:
        room, num_tokens, rows, drawing = STEP_TOKENS, 0, 0, list[Running]()
        for request in self.running:
            if request.left:
                part = min(room, request.left)
                room, num_tokens, request.left = room - part, num_tokens + part, request.left - part
                if request.left:
                    continue
            else:
                rows += 1
            drawing.append(request)
        self.now_s += TRUE.step_s + TRUE.token_s * num_tokens + TRUE.row_s * rows
        for place, request in enumerate(drawing):
            if request.reads:
                self.times.token(request, self.now_s + place * 1e-4)
            request.answer -= 1
            if not request.answer:
                self.leave(request)


@pytest.mark.parametrize("at_once", [1, 4, 12])
@pytest.mark.parametrize("seed", range(3))
def test_speed_is_that_of_the_server(seed: int, at_once: int) -> None:
    """Although prompts take several steps, requests are cancelled, readers pause, and it rests at times."""
    server, rng = Server(seed), Random(seed)
    for _ in range(600):
        if not server.running:
            server.now_s += rng.choice([0.0, 100.0])
        while len(server.running) < rng.randint(1, at_once):
            server.ask(rng.choice([rng.randrange(1, 200), rng.randrange(1000, 6000)]))
        server.step()
        if server.running and rng.random() < 0.02:
            server.leave(rng.choice(server.running))
        if server.running and rng.random() < 0.02:
            paused = rng.choice(server.running)
            paused.reads = False
            server.times.end(paused)
    found = server.times.speed
    assert found.prefill_s(0, 3000, STEP_TOKENS) == pytest.approx(
        TRUE.prefill_s(0, 3000, STEP_TOKENS), rel=0.15
    )
    for rows in (1, at_once):
        assert found.step_s + rows * found.row_s == pytest.approx(TRUE.step_s + rows * TRUE.row_s, rel=0.35)


def test_server_that_always_has_prompts_is_timed() -> None:
    """None of its samples can end where no prompt has begun."""
    server = Server(0)
    started_s = server.now_s
    for number in count():
        server.ask(3000 if number % 2 else 500)
        server.ask(3000)
        while sum(bool(request.left) for request in server.running) > 1:
            server.step()
        if server.times.speed.token_s:
            break
    assert server.now_s - started_s < 12 * SAMPLE_S_MAX
    assert server.times.speed.prefill_s(0, 3000, STEP_TOKENS) == pytest.approx(
        TRUE.prefill_s(0, 3000, STEP_TOKENS), rel=0.4
    )
