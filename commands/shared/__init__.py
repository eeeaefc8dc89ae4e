"""What several commands use: options, and the exporter's libraries."""
