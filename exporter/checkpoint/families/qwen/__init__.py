"""Qwen's vision-language families: images at their own resolution, positions of three parts."""
