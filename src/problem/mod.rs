//! Validation: descriptions of tensors and options become a checked [`Attention`] problem (other operators: [`Indexer`], [`MergedStates`]),
//! which planner and backends work with. src/ops/ calls it before it allocates or launches; for meta kernels, with unknown sizes. These
//! modules see no tensors, only [`TensorDesc`]s, so tests need neither torch data nor a GPU. Errors are `ValueError`s, and name the
//! argument, what it got and what it expects.

mod append;
mod attention;
mod block_mask;
mod cache;
mod cache_values;
mod cached;
mod checks;
mod dense;
mod fast;
mod features;
mod formats;
mod indexer;
mod lengths;
mod merge;
mod operands;
mod scores;
mod selection;
mod sparse;
mod tensor;
mod tree;

pub use attention::{padded_headdim, Appended, Attention, Cache, CacheLayout, Keys, Queries, Rotary, Window};
pub use block_mask::{
    check_backward as check_lists_of_backward, validate_block_lists, ListValues, BLOCK_COLUMNS, BLOCK_ROWS, LIST_HEADER, TILE_WORDS,
};
pub use cache_values::{validate_kvcache_values, CacheValues, CachedSequence};
pub use cached::{validate_kvcache, validate_mla};
pub use dense::{validate, validate_backward, validate_dlse};
pub use fast::{validate_fast, validate_prepare};
pub use features::{RequestedFeatures, ScoreFunction};
pub use indexer::{validate_indexer, Indexer, IndexerArgs, INDEXER_HEADDIM};
pub use lengths::validate_lengths;
pub use merge::{validate_merge, MergedStates};
pub use selection::validate_kv_indices;
pub use sparse::{validate_sparse, DescribedTokens};
pub use tensor::{Backend, DType, Device, Dims, Options, TensorDesc};
