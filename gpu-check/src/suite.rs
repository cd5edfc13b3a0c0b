//! The conformance suite, section by section, and a check that results have equal bits on every queue.

use conformance::Section;
use weftgrad::{Cpu, Runtime};

use crate::report::Found;

const DETERMINISM: &str = "determinism";

pub(crate) fn items() -> Vec<String> {
    let names = conformance::sections::<Cpu>().into_iter().map(|(name, _)| name);
    names.chain([DETERMINISM]).map(String::from).collect()
}

pub(crate) fn run<R: Runtime>(rt: &R, item: &str) -> Result<Found, String> {
    let section: Section = if item == DETERMINISM {
        conformance::determinism(|_| rt.fork().unwrap_or_else(|_| rt.clone()))
    } else {
        let all = conformance::sections::<R>();
        let (_, run) = all.iter().find(|(name, _)| *name == item).ok_or(format!("no section {item}"))?;
        run(rt)
    };
    Ok(Found::checks(section.checks, section.failures).with("skipped", section.skipped.len()))
}
