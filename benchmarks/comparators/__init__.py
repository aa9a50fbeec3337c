"""Ways to survive failures, each behind `system.CheckpointSystem`, which the evaluation compares."""
