//! Context parallelism: sequences cut over the ranks of a mesh's context axis, beside any strategy over its other axes.
//!
//! [`Mesh::context_parallel`](crate::mesh::Mesh::context_parallel) cuts the sequences of a model; its
//! [`ContextSlot`](nn::parallel::ContextSlot)s are `nn`'s. Ranks along context have the same parameters, get the same
//! examples and compute on parts of their sequences. Memory and work of activations are those of `1/c` of the tokens.
//! (Dropout draws a mask of all tokens.)
//!
//! | | ranks along context |
//! |---|---|
//! | examples, and random values | are the same, which the first batch and the random state are checked for |
//! | a loss | is by a rank's part of the tokens, and stands for the whole |
//! | gradients, and losses with their weights | are summed over data × shard × context |
//! | ZeRO | shards over shard × context |
//!
//! Of `2c` chunks of a sequence a rank has an early and a late one (zig-zag), so that causal attention is equal work
//! for all. Only attention reads tokens of other ranks, in one of the ways of [`ContextExchange`].
//!
//! **Invariant**: ranks along the context axis read the same examples, in parts, and make the same decisions.

mod cut;
mod gathered;
mod masked;
mod masks;
mod order;
mod partial;
mod programs;
mod ranks;
mod ring;
mod sequence;
mod ulysses;

pub use ranks::ContextRanks;

/// The exchange by which attention gets keys and values of other ranks (Megatron: `cp_comm_type`). The table has the
/// elements that a rank sends in a layer, for `b` sequences of `s` tokens over `c` ranks. There are `a` heads of
/// queries and `g` of keys and values, `d` wide:
///
/// | | elements forward | elements backward |
/// |---|---|---|
/// | `AllGather` | `(c − 1)/c · 2 · b·s·g·d` | twice as many: keys and values again, and their gradients |
/// | `Ring` | as many | as many |
/// | `Ulysses` | `(c − 1)/c² · b·s·d·(2a + 2·max(g, c))` | as many as forward |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ContextExchange {
    /// Keys and values are gathered before attention, and again in backward (Llama 3). Cheap with few heads of keys and
    /// values.
    #[default]
    AllGather,
    /// Blocks of keys and values travel from rank to rank during the attention over the last block (Liu et al. 2023). A
    /// rank holds three blocks: its own, the current and the arriving one; in backward also gradients of three, in the
    /// type of computation. Supports no second derivatives. A sliding window is a mask, of blocks that all travel. For
    /// attention by a program, keys and values are gathered instead.
    Ring,
    /// Each rank gets some heads of the whole sequence for attention (Jacobs et al. 2023). The number of ranks must
    /// divide the heads of queries, and divide those of keys and values or be their multiple. If there are fewer heads
    /// of keys than ranks, copies of them travel. The output of attention is kept twice.
    Ulysses,
}
