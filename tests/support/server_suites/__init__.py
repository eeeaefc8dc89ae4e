"""The suites of other servers, run against vtx-serve: `make test-server-suites`."""
