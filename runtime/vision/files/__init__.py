"""The sources of images, and the structure of image files, read before anything is decoded."""
