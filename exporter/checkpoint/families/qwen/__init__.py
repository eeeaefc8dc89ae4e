"""Qwen's vision-language families: images at native resolution, positions of three parts."""
