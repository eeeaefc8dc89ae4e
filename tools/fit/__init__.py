"""The configuration of a bundle that keeps a budget: searched, tested on questions held out, written as a card."""
