"""Image layouts, one file each; `vtx.runtime.vision.layout` names them."""
