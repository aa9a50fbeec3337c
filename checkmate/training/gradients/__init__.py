"""The backward pass: reduces gradients over the tagged ring."""
