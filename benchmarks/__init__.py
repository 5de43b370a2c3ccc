"""The benchmarks of Holdfast: ``python -m benchmarks`` lists them."""
