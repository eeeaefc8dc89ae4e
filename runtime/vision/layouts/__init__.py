"""Image layouts, one file each; each registers itself by `vtx.runtime.vision.layout.image_layout`."""
