//! The findings of a suite.

use std::fmt;

use numcore::Result;

use crate::caught::caught;

/// One part of a suite: the number of checks, and the failures.
#[derive(Clone, Debug)]
pub struct Section {
    /// The name of the section.
    pub name: &'static str,
    /// The number of checks that ran.
    pub checks: usize,
    /// One line for each failed check: its name, and the failure.
    pub failures: Vec<String>,
    /// Checks that this runtime cannot run, and the reason.
    pub skipped: Vec<String>,
}

impl Section {
    /// A section in which no check has run yet.
    pub fn new(name: &'static str) -> Self {
        Section { name, checks: 0, failures: Vec::new(), skipped: Vec::new() }
    }

    /// Runs one check; an error or a panic is its failure.
    pub fn check(&mut self, what: impl fmt::Display, f: impl FnOnce() -> Result<Verdict>) {
        self.checks += 1;
        match caught(f) {
            Ok(Verdict(None)) => {}
            Ok(Verdict(Some(why))) | Err(why) => self.failures.push(format!("{what}: {why}")),
        }
    }

    /// Records that a check cannot run on this runtime.
    pub fn skip(&mut self, what: impl fmt::Display) {
        self.skipped.push(what.to_string());
    }
}

/// The result of a check that finished.
#[derive(Clone, Debug)]
pub struct Verdict(Option<String>);

impl Verdict {
    /// The verdict of a check that holds.
    pub const PASSED: Verdict = Verdict(None);

    /// The verdict of a check that does not hold, for this reason.
    pub fn failed(why: impl fmt::Display) -> Self {
        Verdict(Some(why.to_string()))
    }

    /// The verdict of a check that holds if `is` does.
    pub fn when<D: fmt::Display>(is: bool, why: impl FnOnce() -> D) -> Self {
        if is { Verdict::PASSED } else { Verdict::failed(why()) }
    }

    /// The reason why the check does not hold, if it does not.
    pub fn reason(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// Combines two verdicts: holds if both do; otherwise has the first reason.
    pub fn and(self, other: Verdict) -> Verdict {
        if self.0.is_some() { self } else { other }
    }

    /// Combines verdicts: holds if all do; otherwise has the first reason. After a failure the others are still
    /// computed, up to the first error. So a runtime that lists its kernels before it compiles them meets all of them.
    pub fn all(verdicts: impl IntoIterator<Item = Result<Verdict>>) -> Result<Verdict> {
        verdicts.into_iter().try_fold(Verdict::PASSED, |so_far, next| Ok(so_far.and(next?)))
    }
}

/// Every section of a suite.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The sections in the order they ran.
    pub sections: Vec<Section>,
}

impl Report {
    /// Tells whether no check failed.
    pub fn passed(&self) -> bool {
        self.sections.iter().all(|s| s.failures.is_empty())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for s in &self.sections {
            let counts = format!("{} checks, {} failed, {} skipped", s.checks, s.failures.len(), s.skipped.len());
            writeln!(f, "{:<24} {counts}", s.name)?;
            s.failures.iter().try_for_each(|line| writeln!(f, "    FAIL {line}"))?;
            s.skipped.iter().try_for_each(|line| writeln!(f, "    skip {line}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_errors_and_panics_are_lines() {
        let mut s = Section::new("s");
        s.check("fine", || Ok(Verdict::PASSED));
        s.check("wrong", || Ok(Verdict::failed("1 is not 2")));
        s.check("error", || Err(numcore::Error::argument("op", "why")));
        s.check("panic", || panic!("at the disco"));
        assert_eq!(s.checks, 4);
        assert_eq!(s.failures, ["wrong: 1 is not 2", "error: op: why", "panic: panicked: at the disco"]);
        assert!(!Report { sections: vec![s] }.passed());
    }

    #[test]
    fn the_first_reason_of_several_counts_and_an_error_ends_them() {
        let two = || [Ok(Verdict::PASSED), Ok(Verdict::failed("second")), Ok(Verdict::failed("third"))];
        assert_eq!(Verdict::all(two()).unwrap().reason(), Some("second"));
        assert_eq!(Verdict::all([Ok(Verdict::PASSED), Ok(Verdict::PASSED)]).unwrap().reason(), None);
        assert!(Verdict::all(two().into_iter().chain([Err(numcore::Error::argument("op", "why"))])).is_err());
    }
}
