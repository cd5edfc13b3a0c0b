//! Nobody but the check says that a schedule was checked.

use distributed::pipeline::{Checked, Schedule};

fn forge(schedule: Schedule) -> Checked {
    Checked { schedule, sharded: false }
}

fn main() {}
