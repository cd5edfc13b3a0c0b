//! Training that adapts to its ranks: [local updates](local_updates) for slow links, [balancing](balance) for ranks of
//! different speeds, and [ranks that leave and join](elastic). All of it wraps or rebuilds any
//! [`Step`](distributed::train::Step).
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod balance;
pub mod elastic;
pub mod local_updates;
