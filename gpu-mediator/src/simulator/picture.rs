//! Draws shares over time as a picture (SVG): one panel per policy, one line per client, and a
//! dotted line for the share that each should get.

use std::fmt::Write;

use super::{Outcome, WINDOW};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 150.0;
const LEFT: f64 = 50.0;
const TOP: f64 = 44.0;
const GAP: f64 = 40.0;
/// Colours that people with colour blindness can distinguish (Okabe and Ito).
const COLOURS: [&str; 6] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
];

/// Draws panels, each with its title, for clients with these names.
pub fn draw(title: &str, clients: &[String], panels: &[(String, &Outcome)]) -> String {
    let height = TOP + panels.len() as f64 * (HEIGHT + GAP) + 10.0;
    let width = LEFT + WIDTH + 20.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-size=\"15\">{title}</text>\n"
    );
    for (index, name) in clients.iter().enumerate() {
        let x = LEFT + 125.0 * index as f64;
        let colour = COLOURS[index % COLOURS.len()];
        line(
            &mut svg,
            &format!("<text x=\"{x}\" y=\"35\" fill=\"{colour}\">{name}</text>"),
        );
    }
    for (index, (name, outcome)) in panels.iter().enumerate() {
        let top = TOP + GAP / 2.0 + index as f64 * (HEIGHT + GAP);
        panel(&mut svg, name, outcome, top);
    }
    svg.push_str("</svg>\n");
    svg
}

fn line(svg: &mut String, text: &str) {
    svg.push_str(text);
    svg.push('\n');
}

fn panel(svg: &mut String, name: &str, outcome: &Outcome, top: f64) {
    let bottom = top + HEIGHT;
    let y = |share: f64| bottom - share.min(1.0) * HEIGHT;
    let windows = outcome.shares.iter().map(Vec::len).max().unwrap_or(0);
    let x = |window: usize| LEFT + WIDTH * window as f64 / windows.max(2).saturating_sub(1) as f64;
    line(
        svg,
        &format!("<text x=\"{LEFT}\" y=\"{:.1}\">{name}</text>", top - 5.0),
    );
    for percent in [0, 25, 50, 75, 100] {
        let y = y(f64::from(percent) / 100.0);
        line(
            svg,
            &format!(
                "<path d=\"M{LEFT} {y:.1}h{WIDTH}\" stroke=\"#ddd\"/><text x=\"{:.1}\" \
                 y=\"{:.1}\" text-anchor=\"end\" font-size=\"10\">{percent} %</text>",
                LEFT - 4.0,
                y + 3.0
            ),
        );
    }
    let seconds = WINDOW.as_secs_f64() * windows as f64;
    line(
        svg,
        &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" font-size=\"10\">{seconds:.0} s</text>",
            LEFT + WIDTH,
            bottom + 12.0
        ),
    );
    for (index, (shares, ideal)) in outcome.shares.iter().zip(&outcome.ideal).enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let mut path = String::new();
        for (window, &share) in shares.iter().enumerate() {
            let step = if window == 0 { 'M' } else { 'L' };
            // Writing to a string cannot fail.
            let _ = write!(path, "{step}{:.1} {:.1}", x(window), y(share));
        }
        line(
            svg,
            &format!(
                "<path d=\"M{LEFT} {:.1}h{WIDTH}\" stroke=\"{colour}\" stroke-dasharray=\"2 4\"/>\
                 <path d=\"{path}\" stroke=\"{colour}\" fill=\"none\"/>",
                y(*ideal)
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_line_for_each_client_in_each_panel() {
        let outcome = Outcome {
            ideal: vec![0.5, 0.5],
            shares: vec![vec![0.4, 0.5], vec![0.6, 0.5]],
            ..Outcome::default()
        };
        let names = ["a".to_owned(), "b".to_owned()];
        let panels = [("one".to_owned(), &outcome), ("two".to_owned(), &outcome)];
        let svg = draw("title", &names, &panels);
        assert_eq!(svg.matches("fill=\"none\"").count(), 4);
        assert_eq!(svg.matches("stroke-dasharray").count(), 4);
        assert!(svg.ends_with("</svg>\n"));
    }
}
