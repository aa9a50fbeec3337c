"""The tagging ring: AllReduce and AllGather over kernel TCP (design, section 3)."""
