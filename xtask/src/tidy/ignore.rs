//! `.gitignore`, the part of its language this project uses: `name`, `name/`, `/from/the/root` and `*.ext`.
//!
//! Asking git instead would tie the rules to a checkout; they also hold in an unpacked archive.

/// What not to look at.
pub(super) struct Ignore {
    patterns: Vec<Pattern>,
}

struct Pattern {
    folders_only: bool,
    what: What,
}

enum What {
    Name(String),
    Extension(String),
    Path(String),
}

impl Ignore {
    /// An error for a pattern outside the part of the language that is understood.
    pub(super) fn parse(text: &str) -> Result<Ignore, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Ok(Ignore { patterns: lines.map(parse_pattern).collect::<Result<_, _>>()? })
    }

    /// Whether `path` (from the root) is ignored; its parents are assumed not to be.
    pub(super) fn ignores(&self, path: &str, is_folder: bool) -> bool {
        self.patterns.iter().any(|pattern| (is_folder || !pattern.folders_only) && pattern.what.matches(path))
    }
}

impl What {
    fn matches(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or(path);
        match self {
            What::Name(wanted) => name == wanted,
            What::Extension(wanted) => name.strip_suffix(wanted.as_str()).is_some_and(|stem| stem.ends_with('.')),
            What::Path(wanted) => path == wanted,
        }
    }
}

fn parse_pattern(line: &str) -> Result<Pattern, String> {
    let body = line.strip_suffix('/').unwrap_or(line);
    let plain = |text: &str| !text.contains(['*', '?', '[', '!', '\\']);
    let what = match body.strip_prefix("*.") {
        Some(ext) if plain(ext) && !ext.contains('/') => What::Extension(ext.into()),
        None if plain(body) && body.contains('/') => What::Path(body.trim_start_matches('/').into()),
        None if plain(body) => What::Name(body.into()),
        _ => {
            return Err(format!(".gitignore: `{line}` is not of the form name, name/, /path or *.ext that tidy reads"));
        }
    };
    Ok(Pattern { folders_only: body != line, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pattern: &str, path: &str, is_folder: bool) -> bool {
        Ignore::parse(&format!("# comment\n\n{pattern}\n")).expect("understood").ignores(path, is_folder)
    }

    #[test]
    fn names_match_anywhere() {
        assert!(check(".venv/", "bench/.venv", true) && check("out", "a/out", false));
        assert!(!check(".venv/", "bench/.venv", false), "folders only");
        assert!(!check("out", "a/out.rs", false));
    }

    #[test]
    fn a_slash_anchors_at_the_root() {
        assert!(check("/target/", "target", true) && check("bench/out/", "bench/out", true));
        assert!(!check("/target/", "a/target", true));
    }

    #[test]
    fn extensions_match_file_names() {
        assert!(check("*.pyc", "a/b.pyc", false));
        assert!(!check("*.pyc", "a/pyc", false) && !check("*.pyc", "a/bpyc", false));
    }

    #[test]
    fn other_patterns_are_refused_by_name() {
        for pattern in ["!keep", "**/x", "a*b", "*.[oa]"] {
            assert!(Ignore::parse(pattern).is_err_and(|error| error.contains(pattern)), "{pattern}");
        }
    }
}
