"""Journal to rich renderables."""
