//! Context parallelism: sequences cut over the ranks along a mesh's context axis, trained by any strategy over its other axes.
//!
//! [`Mesh::context_parallel`](crate::mesh::Mesh::context_parallel) cuts the sequences of a model; its
//! [`ContextSlot`](nn::parallel::ContextSlot)s are `nn`'s. Ranks along context have the same parameters, are given the same examples and
//! compute on parts of their sequences: memory and work of activations are those of `1/c` of the tokens. (Dropout draws a mask of all of them.)
//!
//! | | ranks along context |
//! |---|---|
//! | examples, and random values | are the same, which the first batch and the random state are checked for |
//! | a loss | is by a rank's part of the tokens, and stands for the whole |
//! | gradients, and losses with their weights | are summed over data × shard × context |
//! | ZeRO | shards over shard × context |
//!
//! Of `2c` chunks of a sequence a rank has two, an early and a late one (zig-zag), so that causal attention is equal work for all. Only
//! attention looks at tokens of other ranks; [`ContextExchange`] has the ways in which it can.
//!
//! **Invariant**: ranks along the context axis read the same examples, in parts, and decide alike.

mod cut;
mod found;
mod gathered;
mod masked;
mod masks;
mod order;
mod ranks;
mod ring;
mod sequence;
mod ulysses;

pub use ranks::ContextRanks;

/// How attention sees keys and values of other ranks (Megatron: `cp_comm_type`). For `b` sequences of `s` tokens over `c` ranks, with `a` heads
/// of queries, `g` of keys and values, `d` wide, a rank sends in a layer
///
/// | | elements forward | elements backward |
/// |---|---|---|
/// | `AllGather` | `(c − 1)/c · 2 · b·s·g·d` | twice as many: keys and values again, and their gradients |
/// | `Ring` | as many | as many |
/// | `Ulysses` | `(c − 1)/c² · b·s·d·(2a + 2·max(g, c))` | as many as forward |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ContextExchange {
    /// Keys and values are gathered before attention, and again in backward (Llama 3). Cheap where there are few heads of keys and values.
    #[default]
    AllGather,
    /// Keys and values travel from rank to rank, while attention over the last is computed (Liu et al. 2023). A rank has three parts of them: its
    /// own, the one that it computes with, and the one that arrives; in backward also gradients of three, in the type of computation. Gradients
    /// cannot be differentiated again, and there are no sliding windows.
    Ring,
    /// Each rank has some heads of the whole sequence while attention is computed (Jacobs et al. 2023): ranks divide the heads of queries, and
    /// divide those of keys and values or are divided by them. Where there are fewer heads of keys than ranks, copies of them travel. The output
    /// of attention is kept twice.
    Ulysses,
}
