//! The conformance suite, section by section.

use std::time::Instant;

use weftgrad::Runtime;

use crate::report::Report;

pub fn run<R: Runtime>(rt: &R, report: &mut Report) {
    for (name, section) in conformance::sections::<R>() {
        let start = Instant::now();
        let found = section(rt);
        report.checks("suite", name, found.checks, found.failures, start.elapsed());
    }
}
