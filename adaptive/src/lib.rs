//! Training that adapts to its ranks, with any [`Step`](distributed::train::Step). [Local updates](local_updates) and
//! [compressed gradients](powersgd) are for slow links, [balancing](balance) is for ranks of different speeds.
//! [Elastic ranks](elastic) leave and join.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod balance;
pub mod elastic;
pub mod local_updates;
pub mod powersgd;
