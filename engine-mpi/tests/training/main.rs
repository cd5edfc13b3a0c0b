//! Data parallelism, ZeRO, pipelines and checkpoints on ranks that are processes: the tests of `distributed`, by their own source.
#![allow(missing_docs, unused_imports, dead_code)]

extern crate self as distributed;

include!("../../../distributed/tests/all/on_engines.rs");

#[path = "../../../distributed/tests/all/checkpoints.rs"]
mod checkpoints;
#[path = "../support/start.rs"]
mod start;
#[path = "../../../distributed/tests/all/two_trainers.rs"]
mod two_trainers;

use crate::{
    comm::engine::{Portable, WireReader, Writer},
    start as job,
};

/// Gives a run's record its wire form, that of its fields.
macro_rules! portable {
    ($record:path { $($field:ident),* }) => {
        impl Portable for $record {
            fn write(&self, to: &mut Writer) {
                $(self.$field.write(to);)*
            }

            fn read(from: &mut WireReader<'_>) -> numcore::Result<Self> {
                $(let $field = Portable::read(from)?;)*
                Ok(Self { $($field),* })
            }
        }
    };
}
portable!(common::Trace { losses, norms, weights });
portable!(outcome::RunOutcome { losses, norms, pieces });
