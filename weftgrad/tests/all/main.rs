//! What the facade gives its users: the code of its book, and whole training runs.
#![allow(missing_docs)]

mod coming_from;
mod tables;
mod training;
mod verify;
