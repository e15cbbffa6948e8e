"""A small recurrent policy for a fleet of robots: stepgraph with no language model. Usage: policy.py [cpu|cuda]"""

import sys

import torch

from stepgraph import GraphConfig, GraphRunner, Ladder, PaddingPolicy, Slot, StaticBuffers

FLEET, SENSORS, HIDDEN, MOTORS = 64, 24, 64, 4


def main(device: str) -> None:
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(SENSORS, HIDDEN, device=device)
    head = torch.nn.Linear(HIDDEN, MOTORS, device=device)

    @torch.no_grad()
    def step(sensors: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden.copy_(cell(sensors, hidden))  # the state stays on the device and advances in place
        return {"motors": head(hidden).tanh()}

    slots = [
        Slot("sensors", torch.float32, per="request", shape=(SENSORS,), pad=PaddingPolicy.ZERO),
        Slot("hidden", torch.float32, per="request", shape=(HIDDEN,), pad=PaddingPolicy.ZERO, owner="device"),
    ]
    buffers = StaticBuffers(max_requests=FLEET, slots=slots, device=device)
    runner = GraphRunner(step, buffers, GraphConfig.preset("FULL_DECODE_ONLY", ladder=Ladder.vllm(FLEET)))
    runner.capture()

    for robots, newcomers in ((13, 13), (14, 1), (9, 0), (64, 55)):
        joined = range(robots - newcomers, robots)
        if newcomers:  # padding has advanced these rows too, so whoever joins brings its own state
            buffers.patch(joined, hidden=torch.zeros(newcomers, HIDDEN))
        sensors, before = torch.randn(robots, SENSORS), buffers["hidden"][:robots].clone()
        out = runner(sensors=sensors)
        expected = step(sensors.to(device), before)["motors"]  # the same step, called eagerly
        torch.testing.assert_close(out.motors, expected)
        print(f"{robots} robots: {out.mode}, {out.padded - out.real} padded rows ({out.reason})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
