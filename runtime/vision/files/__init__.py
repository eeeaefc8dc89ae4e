"""What an image may be given as, and the structure of image files, read before anything is decoded."""
