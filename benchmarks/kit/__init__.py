"""The machinery that benchmarks share: options, series, ranks, tables, results."""
