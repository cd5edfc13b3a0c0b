//! What became of each stage, and the summary that ends `cargo xtask test`.

use std::fmt;

/// What became of one stage.
#[derive(Debug)]
pub(crate) enum Outcome {
    Passed { seconds: f64 },
    Failed { seconds: f64, why: String },
    NotRun,
}

/// The requested stages, in order, with their outcomes. The display ends with `N passed, N failed`.
#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<(&'static str, Outcome)>,
}

impl Report {
    /// Nothing ran, because the stages of `missing` (stage, why) lack a tool.
    pub(crate) fn blocked(stages: &[&'static str], missing: &[(&'static str, String)]) -> Report {
        let outcome = |stage: &str| match missing.iter().find(|(needs, _)| *needs == stage) {
            Some((_, why)) => Outcome::Failed { seconds: 0.0, why: why.clone() },
            None => Outcome::NotRun,
        };
        Report { rows: stages.iter().map(|&stage| (stage, outcome(stage))).collect() }
    }

    pub(crate) fn push(&mut self, stage: &'static str, outcome: Outcome) {
        self.rows.push((stage, outcome));
    }

    /// Whether nothing has failed.
    pub(crate) fn passed(&self) -> bool {
        self.failures().next().is_none()
    }

    fn failures(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.rows.iter().filter_map(|(stage, outcome)| match outcome {
            Outcome::Failed { why, .. } => Some((*stage, why.as_str())),
            _ => None,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (stage, outcome) in &self.rows {
            writeln!(f, "{stage:<10}{outcome}")?;
        }
        for (stage, why) in self.failures() {
            writeln!(f, "\n{stage} failed: {why}\nrun it alone with: cargo xtask test {stage}")?;
        }
        let passed = self.rows.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Passed { .. })).count();
        write!(f, "\n{passed} passed, {} failed", self.failures().count())
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed { seconds } => write!(f, "{seconds:8.1} s  passed"),
            Outcome::Failed { seconds, .. } => write!(f, "{seconds:8.1} s  FAILED"),
            Outcome::NotRun => write!(f, "{:>8}    not run", "-"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_ends_with_the_counts() {
        let mut report = Report::default();
        report.push("fmt", Outcome::Passed { seconds: 1.25 });
        report.push("clippy", Outcome::Failed { seconds: 30.0, why: "`cargo clippy` failed".into() });
        report.push("doc", Outcome::NotRun);
        let text = report.to_string();
        assert_eq!(text.lines().next(), Some("fmt            1.2 s  passed"));
        assert!(text.contains("clippy        30.0 s  FAILED\ndoc              -    not run\n"), "{text}");
        assert!(text.contains("clippy failed: `cargo clippy` failed\nrun it alone with: cargo xtask test clippy"));
        assert_eq!(text.lines().last(), Some("1 passed, 1 failed"));
    }

    #[test]
    fn a_missing_tool_fails_its_own_stages_only() {
        let report = Report::blocked(&["fmt", "clippy"], &[("clippy", "clippy is missing".into())]);
        assert!(!report.passed());
        assert_eq!(report.to_string().lines().last(), Some("0 passed, 1 failed"));
    }
}
