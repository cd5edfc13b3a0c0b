//! `cargo xtask goldens DIR`: refreshes the reference values of the conformance suite.
//!
//! A group is a `GROUP.json` that lists cases and, where it has any, a `GROUP.safetensors` that holds their tensors.

use std::fs;
use std::path::{Path, PathBuf};

/// Copies every group of `from` into `to`, after checking all of them: nothing is copied when one is incomplete.
pub(crate) fn refresh(from: &Path, to: &Path) -> Result<(), String> {
    let files = group_files(from)?;
    files.iter().try_for_each(|file| check_group(file))?;
    fs::create_dir_all(to).map_err(|error| format!("goldens: cannot create {}: {error}", to.display()))?;
    files.iter().try_for_each(|file| copy_into(file, to))?;
    println!("copied {} files to {}", files.len(), to.display());
    Ok(())
}

fn group_files(from: &Path) -> Result<Vec<PathBuf>, String> {
    let unreadable = |error| format!("goldens: cannot read {}: {error}", from.display());
    let entries = fs::read_dir(from).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(unreadable)?;
    let mut files: Vec<PathBuf> =
        entries.into_iter().map(|entry| entry.path()).filter(|path| is_golden(path)).collect();
    files.sort();
    if files.is_empty() {
        return Err(format!("goldens: {} holds no *.json and no *.safetensors", from.display()));
    }
    Ok(files)
}

fn is_golden(path: &Path) -> bool {
    path.extension().is_some_and(|ext| ext == "json" || ext == "safetensors")
}

/// A JSON file with cases needs its tensor file in the same folder.
fn check_group(file: &Path) -> Result<(), String> {
    let tensors = file.with_extension("safetensors");
    if file == tensors || tensors.is_file() {
        return Ok(());
    }
    let text = fs::read_to_string(file).map_err(|error| format!("goldens: cannot read {}: {error}", file.display()))?;
    if has_cases(&text) {
        return Err(format!("goldens: {} lists cases, but {} is not there", file.display(), tensors.display()));
    }
    Ok(())
}

/// Whether the JSON's `"cases"` is a non-empty list.
fn has_cases(json: &str) -> bool {
    let Some((_, after)) = json.split_once("\"cases\"") else { return false };
    let list: String = after.chars().filter(|c| !c.is_whitespace()).take(3).collect();
    list.starts_with(":[") && list != ":[]"
}

fn copy_into(file: &Path, to: &Path) -> Result<(), String> {
    let Some(name) = file.file_name() else { return Ok(()) };
    // Bytes, not fs::copy: the copy must be writable for any permissions of the source.
    let copied = fs::read(file).and_then(|bytes| fs::write(to.join(name), bytes));
    copied.map_err(|error| format!("goldens: cannot copy {} to {}: {error}", file.display(), to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fresh folder, removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("weftgrad-xtask-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).expect("a temporary folder");
            Scratch(path)
        }

        fn with(self, file: &str, text: &str) -> Scratch {
            fs::write(self.0.join(file), text).expect("written");
            self
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn groups_are_copied_and_other_files_are_not() {
        let from = Scratch::new("copied").with("nn.json", r#"{"cases": [1]}"#).with("nn.safetensors", "tensors");
        let from = from.with("lr.json", "[1]").with("README.md", "no");
        let to = from.0.join("out");
        refresh(&from.0, &to).expect("refreshed");
        assert_eq!(fs::read_to_string(to.join("nn.safetensors")).expect("copied"), "tensors");
        assert!(to.join("lr.json").is_file() && !to.join("README.md").exists());
    }

    #[test]
    fn an_incomplete_group_copies_nothing() {
        let from = Scratch::new("incomplete").with("lr.json", "[1]").with("nn.json", r#"{"cases": [1]}"#);
        let to = from.0.join("out");
        let error = refresh(&from.0, &to).expect_err("incomplete");
        assert!(error.contains("nn.json") && error.contains("nn.safetensors"), "{error}");
        assert!(!to.exists());
    }

    #[test]
    fn a_folder_without_groups_is_an_error() {
        assert!(refresh(&Scratch::new("none").0, Path::new("unused")).is_err());
        assert!(refresh(Path::new("no/such/folder"), Path::new("unused")).is_err());
    }

    #[test]
    fn only_a_filled_list_counts_as_cases() {
        assert!(has_cases("{\n \"cases\": [\n  {\"id\": 1}]}"));
        assert!(!has_cases(r#"{"cases": []}"#));
        assert!(!has_cases(r#"[{"op": "step"}]"#));
    }

    #[test]
    fn the_program_for_gpus_embeds_every_file() {
        let root = crate::repo::root();
        let program = fs::read_to_string(root.join("gpu-check/src/goldens.rs")).expect("its source");
        for entry in fs::read_dir(root.join("conformance/goldens")).expect("the goldens") {
            let name = entry.expect("an entry").file_name().into_string().expect("a name");
            let reference = name.ends_with(".json") || name.ends_with(".safetensors");
            assert!(!reference || program.contains(&format!("\"{name}\"")), "{name} is left out");
        }
    }
}
