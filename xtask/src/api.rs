//! The public API as text, `docs/public-api/CRATE.txt`: one line for each item, field, variant and method, so that a review sees what changes
//! for users. It is read from the pages that rustdoc has written, which know what is re-exported and what is hidden.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::repo;

/// The crates that users depend on, as rustdoc names them.
const CRATES: &[&str] = &[
    "adaptive",
    "autograd",
    "comm",
    "data",
    "distributed",
    "engine_process",
    "launch",
    "linalg",
    "models",
    "models_export",
    "models_import",
    "nn",
    "numcore",
    "optim",
    "pipeline_schedule",
    "planner",
    "train",
    "watch",
    "weftgrad",
];

/// The compiler whose pages are read. Others may write what a line is made of in another way.
const RUSTDOC: &str = "data-rustdoc-version=\"1.95.";

/// An error that names the crates whose public API is not what its file says.
pub(crate) fn check() -> Result<(), String> {
    let mut differ = Vec::new();
    for name in CRATES {
        let Some(lines) = listing(name)? else {
            println!("the public API is not compared: another rustdoc than 1.95 wrote the pages");
            return Ok(());
        };
        if fs::read_to_string(file(name)).unwrap_or_default() != lines {
            differ.push(*name);
        }
    }
    if differ.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the public API of {} is not what docs/public-api says: `cargo xtask api` writes it",
        differ.join(", ")
    ))
}

/// Writes the files. The documentation is there.
pub(crate) fn refresh() -> Result<(), String> {
    for name in CRATES {
        let lines = listing(name)?.ok_or("the files are written with Rust 1.95")?;
        let path = file(name);
        fs::create_dir_all(path.with_file_name("")).and_then(|()| fs::write(&path, lines)).map_err(at(&path))?;
    }
    Ok(())
}

fn file(name: &str) -> PathBuf {
    repo::root().join("docs/public-api").join(format!("{name}.txt"))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> String {
    let path = path.display().to_string();
    move |error| format!("{path}: {error}")
}

/// The lines of a crate; none if another rustdoc wrote its pages.
fn listing(name: &str) -> Result<Option<String>, String> {
    let root = repo::root().join("target/doc").join(name);
    let all = read(&root.join("all.html"))?;
    if !all.contains(RUSTDOC) {
        return Ok(None);
    }
    let mut lines = Vec::new();
    for (page, path) in links(&all) {
        lines.extend(items(&format!("{name}::{path}"), &read(&root.join(page))?));
    }
    lines.sort();
    Ok(Some(lines.join("\n") + "\n"))
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(at(path))
}

/// The pages and paths that the list of all items has. (Pages of what was removed stay in the folder.)
fn links(all: &str) -> Vec<(&str, &str)> {
    let lists = all.split("<ul class=\"all-items\">").skip(1).filter_map(|list| list.split("</ul>").next());
    let links = lists.flat_map(|list| list.split("<a href=\"").skip(1));
    links.filter_map(|link| link.split("</a>").next()?.split_once("\">")).collect()
}

/// The declaration on a page and the methods of its own, each with the item's path before it.
fn items(path: &str, page: &str) -> Vec<String> {
    let Some(declared) = between(page, "<pre class=\"rust item-decl\"><code>", "</code></pre>") else {
        return Vec::new();
    };
    let mut lines = vec![format!("{path}: {}", plain(declared))];
    let methods = between(page, "<div id=\"implementations-list\">", "<h2 id=").unwrap_or_default();
    for method in methods.split("<h4 class=\"code-header\">").skip(1) {
        let declared = method.split("</h4>").next().unwrap_or_default();
        lines.push(format!("{path}: {}", plain(declared)));
    }
    lines
}

/// What is between two marks; up to the end, if the second is not there.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    let rest = &text[text.find(from)? + from.len()..];
    Some(rest.find(to).map_or(rest, |end| &rest[..end]))
}

/// Text without tags, on one line.
fn plain(html: &str) -> String {
    let mut text = String::new();
    let mut rest = html;
    while let Some(tag) = rest.find('<') {
        text.push_str(&rest[..tag]);
        rest = rest[tag..].find('>').map_or("", |end| &rest[tag + end + 1..]);
    }
    text.push_str(rest);
    let entities = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&nbsp;", " "), ("&amp;", "&")];
    let text = entities.iter().fold(text, |text, (entity, character)| text.replace(entity, character));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_gives_its_declaration_and_methods() {
        let page = "<pre class=\"rust item-decl\"><code>pub struct <a>Ranks</a>&lt;R&gt; { <span>/* private fields */</span> }</code></pre>\
                    <h2 id=\"implementations\"></h2><div id=\"implementations-list\"><section id=\"method.new\"><h4 class=\"code-header\">pub fn \
                    <a>new</a>(\n    size: <a>usize</a>,\n) -&gt; Self</h4></section><p>docs</p><h2 id=\"trait-implementations\">\
                    <h4 class=\"code-header\">fn clone(&amp;self)</h4>";
        let found = items("comm::Ranks", page);
        assert_eq!(
            found,
            [
                "comm::Ranks: pub struct Ranks<R> { /* private fields */ }",
                "comm::Ranks: pub fn new( size: usize, ) -> Self",
            ]
        );
    }

    #[test]
    fn items_are_those_of_the_list() {
        let all = "<a href=\"../x.html\">x</a><ul class=\"all-items\"><li><a href=\"a/struct.B.html\">a::B</a></li></ul><a href=\"c\">c</a>";
        assert_eq!(links(all), [("a/struct.B.html", "a::B")]);
    }

    #[test]
    fn tags_and_entities_are_taken_out() {
        assert_eq!(plain("a <b>c</b>\n  &amp;lt; &lt;d&gt;"), "a c &lt; <d>");
    }
}
