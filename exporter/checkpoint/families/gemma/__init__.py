"""Google's vision-language families: sliding windows, and in Gemma 4 E layers that share keys and values."""
