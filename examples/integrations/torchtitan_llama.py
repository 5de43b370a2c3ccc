"""Trains torchtitan's Llama 3 and goes on after the last step. Kill it, and start it again."""

from __future__ import annotations

import sys

from torchtitan.models.llama3 import config_registry

from holdfast.integrations.torchtitan import HoldfastCheckpointManager

config = config_registry.llama3_debugmodel()
config.dump_folder = sys.argv[1]
config.checkpoint = HoldfastCheckpointManager.Config(
    enable=True,
    interval=10,  # steps from one checkpoint in storage to the next
    memory_interval=1,  # steps from one snapshot in memory to the next
    last_save_model_only=False,
)
trainer = config.build()
try:
    trainer.train()
finally:
    trainer.close()
