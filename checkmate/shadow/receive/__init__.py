"""From streams to buckets of gradients."""
