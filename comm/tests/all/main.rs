//! What every engine must do, on ranks that are threads, and what is theirs alone.
#![allow(missing_docs)]

mod byte_lengths;
mod collectives;
mod collectives_types;
mod deadlines;
mod faults;
mod in_order;
mod thread_engine;
mod thread_rendezvous;
