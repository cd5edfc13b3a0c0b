//! The stage `book`: mdBook renders the chapters, and every link between the pages leads to one.

use std::{fs, path::Path, process::Command};

use crate::{repo, stages};

/// Where mdBook is installed, and where the book is rendered.
pub(crate) const FOLDER: &str = "target/mdbook-0.5.4";
const PAGES: &str = "target/book";

pub(crate) fn run() -> Result<(), String> {
    stages::run_command(
        Command::new(format!("{FOLDER}/bin/mdbook")).args(["build", "docs/book"]),
        "mdbook build docs/book",
    )?;
    let pages = repo::root().join(PAGES);
    let lost = lost(&pages).map_err(|error| format!("{}: {error}", pages.display()))?;
    if lost.is_empty() { Ok(()) } else { Err(format!("links that lead nowhere:\n{}", lost.join("\n"))) }
}

/// The links of all pages to files that are not there.
fn lost(pages: &Path) -> std::io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(pages)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "html") {
            let text = fs::read_to_string(&path)?;
            let gone = files(&text).filter(|file| !pages.join(file).exists());
            found.extend(gone.map(|file| format!("{}: {file}", path.display())));
        }
    }
    found.sort();
    Ok(found)
}

/// What the links of a page name, but for addresses of the web and places in the page itself.
fn files(html: &str) -> impl Iterator<Item = &str> {
    let targets = html.split("href=\"").skip(1).filter_map(|rest| rest.split(['"', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains(':') && !target.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_name_files() {
        let html = r##"<a href="a.html#x"><a href="#y"><a href="https://example.org/"><link href="css/b.css">"##;
        assert_eq!(files(html).collect::<Vec<_>>(), ["a.html", "css/b.css"]);
    }

    #[test]
    fn what_is_not_there_is_lost() -> std::io::Result<()> {
        let folder = std::env::temp_dir().join(format!("weftgrad-book-{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("a.html"), r#"<a href="a.html"><a href="gone.html#x">"#)?;
        let found = lost(&folder)?;
        fs::remove_dir_all(&folder)?;
        assert!(matches!(&found[..], [one] if one.ends_with("a.html: gone.html")), "{found:?}");
        Ok(())
    }
}
