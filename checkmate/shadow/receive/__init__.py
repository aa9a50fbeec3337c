"""Reception of streams into buckets of gradients."""
