"""What several commands use: options, progress bars, and the exporter's libraries."""
