"""The training loops of the frameworks: alone, with a Checkpointer, with their adapters, and with
the framework's own save.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.adapters import own_work

LAYERS, ROWS = 6, 64
#: Steps of a turn that are not counted: of the first ones tensors and slots are made.
WARM_UP = 8


class Turn:
    """One turn of one way: its root, its steps, and the times at which they begin."""

    def __init__(
        self,
        way: str,
        root: str,
        width: int,
        steps: int,
        *,
        counts_bytecodes: bool = False,
        counts_work: bool = False,
    ) -> None:
        self.way, self.root, self.width, self.steps = way, root, width, steps
        self.counts_bytecodes, self.bytecodes = counts_bytecodes, 0
        self.counts_work = counts_work
        self.begins: list[tuple[float, ...]] = []

    def begin(self) -> None:
        """Notes the begin of a step."""
        if self.counts_bytecodes and not self.begins:
            sys.settrace(self._trace)
        clocks = time.perf_counter(), time.thread_time(), self.bytecodes
        self.begins.append((*clocks, *own_work.METER.spent_s()))

    def end(self) -> None:
        """Counts no more bytecodes."""
        if self.counts_bytecodes:
            sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self.bytecodes += event == "opcode"
        return self._trace

    def took(self, clock: int) -> list[float]:
        """Returns what the steps that count took, by a clock: 0 all seconds, 1 those of the
        processor, 2 bytecodes; of the processor's those in the adapter 3, in the Checkpointer 4.
        """
        pairs = zip(self.begins[WARM_UP:], self.begins[WARM_UP + 1 :], strict=False)
        return [after[clock] - before[clock] for before, after in pairs]

    def model(self) -> Any:
        from torch import nn

        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
        return nn.Sequential(*layers)

    def optimizer(self, model: Any) -> Any:
        import torch

        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def data(self) -> Any:
        import torch

        return torch.randn(ROWS * (self.steps + 1), self.width)

    def checkpointer(self, state: dict[str, Any], stack: ExitStack) -> Any:
        """Returns a Checkpointer that was put into the loop; None for the other ways."""
        import holdfast

        if self.counts_work:
            own_work.follow()
        if self.way != "checkpointer":
            return None
        found = stack.enter_context(holdfast.Checkpointer(self.root, state, storage=None))
        found.restore()
        return found


def of_accelerate(turn: Turn, stack: ExitStack) -> None:
    """A loop of accelerate."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    import holdfast
    from holdfast.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        plain := turn.model(), turn.optimizer(plain), DataLoader(turn.data(), batch_size=ROWS)
    )
    state = {"model": model, "optimizer": optimizer.optimizer, "rng": holdfast.Rng()}
    ckpt = turn.checkpointer(state, stack)
    adapter = attach(accelerator, turn.root, storage=None) if turn.way == "adapter" else None
    for step, batch in enumerate(loader):
        turn.begin()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if turn.way == "own":
            accelerator.save_state(f"{turn.root}-own")
        if ckpt is not None:
            ckpt.step(step)
        if adapter is not None:
            adapter.step()
    if adapter is not None:
        adapter.close()
    accelerator.free_memory()


def of_lightning(turn: Turn, stack: ExitStack) -> None:
    """A fit of Lightning."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    import holdfast
    from holdfast.integrations.lightning import HoldfastLightningCallback

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = turn.model()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return turn.optimizer(self)

    class Steps(lightning.Callback):  # type: ignore[misc]
        ckpt: Any = None

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            state = {"model": module, "optimizer": trainer.optimizers[0], "rng": holdfast.Rng()}
            self.ckpt = turn.checkpointer(state, stack)

        def on_train_batch_start(self, *given: Any) -> None:
            turn.begin()

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if self.ckpt is not None:
                self.ckpt.step(trainer.global_step)

    adapters: list[Any] = []
    if turn.way == "adapter":
        adapters = [HoldfastLightningCallback(turn.root, storage=None)]
    if turn.way == "own":
        adapters = [ModelCheckpoint(f"{turn.root}-own", every_n_train_steps=1)]
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=turn.way == "own",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps(), *adapters],
    )
    trainer.fit(Model(), DataLoader(turn.data(), batch_size=ROWS))


def of_transformers(turn: Turn, stack: ExitStack) -> None:
    """The Trainer of transformers."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import holdfast
    from holdfast.integrations.transformers import HoldfastTrainer

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = turn.model()

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": (self.net(x) - labels).square().mean()}

    class Steps(TrainerCallback):  # type: ignore[misc]
        ckpt: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            held = {"model": given["model"], "optimizer": given["optimizer"].optimizer}
            self.ckpt = turn.checkpointer(held | {"rng": holdfast.Rng()}, stack)

        def on_step_begin(self, *given: Any, **named: Any) -> None:
            turn.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.ckpt is not None:
                self.ckpt.step(state.global_step)

    class Rows(torch.utils.data.Dataset[Any]):
        data = turn.data()

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            return {"x": self.data[index], "labels": self.data[index]}

    ours = {"holdfast": turn.root, "holdfast_options": {"storage": None}}
    make: Any = HoldfastTrainer if turn.way == "adapter" else Trainer
    trainer = make(
        model=Net(),
        args=TrainingArguments(
            output_dir=f"{turn.root}-out",
            per_device_train_batch_size=ROWS,
            num_train_epochs=1,
            save_strategy="steps" if turn.way == "own" else "no",
            save_steps=1,
            save_total_limit=1,
            report_to=[],
            logging_steps=10**6,
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Rows(),
        callbacks=[Steps()],
        **(ours if turn.way == "adapter" else {}),
    )
    trainer.train()


def of_deepspeed(turn: Turn, stack: ExitStack) -> None:
    """An engine of DeepSpeed, ZeRO-0 in FP32: its state is one that a Checkpointer takes too."""
    import deepspeed

    import holdfast
    from holdfast.integrations.deepspeed import attach

    model = turn.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=turn.optimizer(model),
        config={"train_micro_batch_size_per_gpu": ROWS, "steps_per_print": 10**9},
    )
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    ckpt = turn.checkpointer({"model": model, "optimizer": inner, "rng": holdfast.Rng()}, stack)
    adapter = attach(engine, turn.root, storage=None) if turn.way == "adapter" else None
    for step, batch in enumerate(turn.data().split(ROWS)):
        turn.begin()
        engine.backward(engine(batch).square().mean())
        engine.step()
        if turn.way == "own":
            engine.save_checkpoint(f"{turn.root}-own", tag="step")
        if ckpt is not None:
            ckpt.step(step)
        if adapter is not None:
            adapter.step()
    if adapter is not None:
        adapter.close()


def of_torchft(turn: Turn, stack: ExitStack) -> None:
    """One replica group of torchft."""
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    import holdfast
    from holdfast.integrations.torchft import attach

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100)
    stack.callback(server.shutdown)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id="group",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://localhost:{server.address().rpartition(':')[2]}",
        hostname="localhost",
    )
    stack.callback(manager.shutdown, wait=False)
    net = turn.model()
    model: Any = DistributedDataParallel(manager, net)
    inner = turn.optimizer(net)
    optimizer: Any = Optimizer(manager, inner)
    state = {"model": net, "optimizer": inner, "rng": holdfast.Rng()}
    ckpt = turn.checkpointer(state, stack)
    adapter = attach(manager, state, turn.root, storage=None) if turn.way == "adapter" else None
    for step, batch in enumerate(turn.data().split(ROWS)):
        turn.begin()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if ckpt is not None:
            ckpt.step(step)
        if adapter is not None:
            adapter.step()
    if adapter is not None:
        adapter.close()


def of_torchtitan(turn: Turn, stack: ExitStack) -> None:
    """The Trainer of torchtitan, with its debug model of two layers."""
    from integrations import torchtitan_on_cpu as cpu  # before torchtitan

    # isort: split
    import torch.distributed as dist
    from torchtitan.components.checkpointer import CheckpointManager

    import holdfast
    from holdfast.integrations.torchtitan import HoldfastCheckpointManager

    config = cpu.llama3_debugmodel()
    config.dump_folder, config.training.steps = turn.root, turn.steps
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.checkpoint = (
        HoldfastCheckpointManager.Config(enable=True, interval=10**6, last_save_model_only=False)
        if turn.way == "adapter"
        else CheckpointManager.Config(
            enable=turn.way == "own", interval=1, async_mode="async", last_save_model_only=False
        )
    )
    trainer = config.build()
    [model], [optimizer] = trainer.model_parts, trainer.optimizers
    ckpt = turn.checkpointer({"model": model, "optimizer": optimizer, "rng": holdfast.Rng()}, stack)
    train_step = trainer.train_step

    def stepped(batches: Any) -> None:
        turn.begin()
        train_step(batches)
        if ckpt is not None:
            ckpt.step(trainer.step)

    trainer.train_step = stepped
    trainer.train()
    trainer.close()
    dist.destroy_process_group()


def of_megatron(turn: Turn, stack: ExitStack) -> None:
    """Megatron-Core's buffers and FP32 optimizer, on one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    import holdfast
    from holdfast.integrations.megatron import attach
    from integrations import megatron_on_cpu  # noqa: F401

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), turn.model())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4), [model])
    [chained] = optimizer.chained_optimizers
    ckpt = turn.checkpointer(
        {"model": model.module, "optimizer": chained.optimizer, "rng": holdfast.Rng()}, stack
    )
    adapter = (
        attach([model], optimizer, None, turn.root, storage=None) if turn.way == "adapter" else None
    )
    for step, batch in enumerate(turn.data().split(ROWS)):
        turn.begin()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        if ckpt is not None:
            ckpt.step(step)
        if adapter is not None:
            adapter.step()
    if adapter is not None:
        adapter.close()


def of_ray(turn: Turn, stack: ExitStack) -> None:
    """One worker of Ray Train, which sends its begins here by a file."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    if not ray.is_initialized():
        env = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": env})
        stack.callback(ray.shutdown)
    TorchTrainer(
        _train_by_ray,
        train_loop_config={"turn": turn},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=f"{turn.root}-ray"),
    ).fit()
    turn.begins = json.loads(Path(f"{turn.root}.json").read_text())


def _train_by_ray(config: dict[str, Any]) -> None:
    """What the worker does."""
    import ray.train
    import torch

    import holdfast
    from holdfast.integrations.ray import checkpointer, report

    torch.set_num_threads(1)
    turn: Turn = config["turn"]
    model = turn.model()
    optimizer = turn.optimizer(model)
    state = {"model": model, "optimizer": optimizer, "rng": holdfast.Rng()}
    with ExitStack() as stack:
        ckpt = turn.checkpointer(state, stack)
        adapter = checkpointer(state, turn.root, storage=None) if turn.way == "adapter" else None
        for step, batch in enumerate(turn.data().split(ROWS)):
            turn.begin()
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            if adapter is not None:
                report({"loss": loss.item()}, step=step)
                continue
            if ckpt is not None:
                ckpt.step(step)
            own = None
            if turn.way == "own":
                Path(f"{turn.root}-own").mkdir(exist_ok=True)
                held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(held, f"{turn.root}-own/state.pt")
                own = ray.train.Checkpoint.from_directory(f"{turn.root}-own")
            ray.train.report({"loss": loss.item()}, checkpoint=own)
        turn.end()
        if adapter is not None:
            adapter.close()
    Path(f"{turn.root}.json").write_text(json.dumps(turn.begins))


LOOPS: dict[str, Callable[[Turn, ExitStack], None]] = {
    "accelerate": of_accelerate,
    "deepspeed": of_deepspeed,
    "lightning": of_lightning,
    "megatron": of_megatron,
    "ray": of_ray,
    "torchft": of_torchft,
    "torchtitan": of_torchtitan,
    "transformers": of_transformers,
}
