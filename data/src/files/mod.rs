//! Reading files: at any place, from several threads, and by records.

mod positioned;
mod records;

pub(crate) use positioned::PositionedFile;
pub(crate) use records::{Cutter, Records, lines};
