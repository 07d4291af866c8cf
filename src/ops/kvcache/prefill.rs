//! Sequences with many query rows, on the forward kernels' tiles.
