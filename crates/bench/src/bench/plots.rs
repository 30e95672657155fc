//! Plots of the tables as SVG, one for each kind measured.

use super::{
    Result,
    results::{Figure, Line, Results},
    subject::{Kind, Subject},
    variant::Variant,
};
use crate::plot::legend;
use plotters::{coord::Shift, prelude::*};
use std::path::Path;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (1100, 520);
const TEXT: (&str, i32) = ("sans-serif", 13);
/// Fraction of a group's width that is filled by its bars.
const FILLED: f64 = 0.84;
/// Width of the plot, the legend included, as a multiple of that of the bars.
const WITH_LEGEND: f64 = 1.2;
/// Height of the names below the bars: three lines.
const NAMES: u32 = 60;

/// Colours that most people can distinguish, also side by side (Okabe and Ito).
const COLOURS: [RGBColor; 9] = [
    RGBColor(0x99, 0x99, 0x99),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0xf0, 0xe4, 0x42),
    RGBColor(0x00, 0x00, 0x00),
];

/// Groups of bars, one for each of several things. A cross stands for a missing measurement.
struct Bars {
    caption: &'static str,
    unit: &'static str,
    legend: Vec<String>,
    groups: Vec<(String, Vec<Option<f64>>)>,
}

/// Draws all plots for which there are figures.
pub fn draw(dir: &Path, s: &Results) -> Result<()> {
    for (name, bars) in
        [("segments.svg", segments(s)), ("bulk.svg", bulk(s)), ("rate.svg", rate(s)), ("http.svg", http(s))]
    {
        if !bars.groups.is_empty() {
            let file = dir.join(name);
            let root = SVGBackend::new(&file, SIZE).into_drawing_area();
            root.fill(&WHITE)?;
            bars.draw(&root)?;
            root.present()?;
        }
    }
    if s.subjects(Kind::Response).is_empty() { Ok(()) } else { response(&dir.join("response.svg"), s) }
}

fn segments(s: &Results) -> Bars {
    let subjects = s.subjects(Kind::Segment);
    let value = |v| move |subject: &Subject| s.line(*subject, v).map(Line::value);
    let groups =
        s.variants(Kind::Segment).into_iter().map(|v| (v.to_string(), subjects.iter().map(value(v)).collect()));
    Bars {
        caption: "Cost of a segment, everything on one CPU, end hosts included",
        unit: "microseconds",
        legend: subjects.iter().map(|subject| subject.label()).collect(),
        groups: groups.collect(),
    }
}

fn bulk(s: &Results) -> Bars {
    by_variant(s, Kind::Bulk, "Throughput", "relative to IP forwarding", |l| l.ratio(Figure::Value).map(|r| r.median))
}

fn rate(s: &Results) -> Bars {
    by_variant(s, Kind::Rate, "New connections, by what each carries", "per second", |l| Some(l.value()))
}

fn http(s: &Results) -> Bars {
    by_variant(s, Kind::Http, "HTTP: processor time per request, by the reply's size", "relative to HAProxy", |l| {
        l.ratio(Figure::Cpu).map(|r| r.median)
    })
}

fn by_variant(
    s: &Results,
    kind: Kind,
    caption: &'static str,
    unit: &'static str,
    value: impl Fn(&Line) -> Option<f64>,
) -> Bars {
    let variants = s.variants(kind);
    let group =
        |subject: Subject| (subject.label(), variants.iter().map(|v| s.line(subject, *v).and_then(&value)).collect());
    let groups = s.subjects(kind).into_iter().map(group).collect();
    Bars { caption, unit, legend: variants.iter().map(Variant::to_string).collect(), groups }
}

impl Bars {
    fn draw<'a>(&self, area: &Area<'a>) -> Result<()> {
        let top = self.groups.iter().flat_map(|(_, bars)| bars).flatten().fold(0.0, |a: f64, b| a.max(*b));
        let (top, width) = (if top > 0.0 { top * 1.05 } else { 1.0 }, self.groups.len() as f64 * WITH_LEGEND);
        let mut chart = ChartBuilder::on(area)
            .caption(self.caption, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(NAMES)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..width, 0.0..top)?;
        // Group names are drawn below, so the axis has no labels.
        chart.configure_mesh().disable_x_mesh().x_labels(0).y_desc(self.unit).label_style(TEXT).draw()?;
        let each = FILLED / self.legend.len() as f64;
        for (n, name) in self.legend.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let bars = self.groups.iter().enumerate().filter_map(|(group, (_, bars))| {
                let left = group as f64 + (1.0 - FILLED) / 2.0 + n as f64 * each;
                Some(Rectangle::new([(left, 0.0), (left + each * 0.92, bars[n]?)], colour.filled()))
            });
            let missing = self.groups.iter().enumerate().filter(|(_, (_, bars))| bars[n].is_none());
            let crosses = missing.map(|(group, _)| {
                let middle = group as f64 + (1.0 - FILLED) / 2.0 + (n as f64 + 0.46) * each;
                Cross::new((middle, top * 0.015), 3, colour.stroke_width(1))
            });
            chart.draw_series(crosses)?;
            let key = move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], colour.filled());
            chart.draw_series(bars)?.label(name).legend(key);
        }
        for (group, (name, _)) in self.groups.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(group as f64 + 0.5, 0.0));
            let style = TEXT.into_text_style(area).pos(centred());
            // A name with several parts has a line for each.
            for (line, part) in name.split(", ").enumerate() {
                area.draw(&Text::new(part.to_owned(), (x, y + 5 + 14 * line as i32), style.clone()))?;
            }
        }
        legend(&mut chart, SeriesLabelPosition::UpperRight)
    }
}

fn centred() -> plotters::style::text_anchor::Pos {
    use plotters::style::text_anchor::{HPos, Pos, VPos};
    Pos::new(HPos::Center, VPos::Top)
}

/// Plots both loads side by side; both axes are logarithmic.
fn response(file: &Path, s: &Results) -> Result<()> {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let mut loads: Vec<u64> = s.subjects(Kind::Response).iter().filter_map(|r| parts(*r)).map(|(_, n)| n).collect();
    loads.dedup();
    for (area, load) in root.split_evenly((1, loads.len())).iter().zip(&loads) {
        let curve = |v: Variant| -> Vec<(f64, f64)> {
            let lines = s.lines_of(Kind::Response).filter(|l| l.variant == v);
            let points = lines.filter_map(|l| Some((parts(l.subject)?, l.value())));
            points.filter(|((_, clients), _)| clients == load).map(|((bytes, _), ms)| (bytes as f64, ms)).collect()
        };
        let curves: Vec<_> = s.variants(Kind::Response).into_iter().map(|v| (v, curve(v))).collect();
        let all = || curves.iter().flat_map(|(_, points)| points);
        let range = |of: fn(&(f64, f64)) -> f64| {
            let low = all().map(of).fold(f64::INFINITY, f64::min);
            low / 1.5..all().map(of).fold(low, f64::max) * 1.5
        };
        let clients = if *load == 1 { "one client".to_owned() } else { format!("{load} clients") };
        let mut chart = ChartBuilder::on(area)
            .caption(format!("Response time, {clients}"), ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(range(|p| p.0).log_scale(), range(|p| p.1).log_scale())?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc("size of the object").y_desc("milliseconds").label_style(TEXT);
        mesh.x_label_formatter(&|bytes| with_unit(*bytes)).y_label_formatter(&|ms| ms.to_string()).draw()?;
        for (n, (variant, points)) in curves.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let key = move |(x, y)| Rectangle::new([(x, y - 2), (x + 12, y + 2)], colour.filled());
            chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
            let dots = points.iter().map(|p| Circle::new(*p, 3, colour.filled()));
            chart.draw_series(dots)?.label(variant.title()).legend(key);
        }
        legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
    }
    root.present()?;
    Ok(())
}

/// A label of an axis of bytes, which has powers of ten: `10 KB`.
fn with_unit(bytes: f64) -> String {
    match bytes {
        n if n >= 1e6 => format!("{} MB", n / 1e6),
        n if n >= 1e3 => format!("{} KB", n / 1e3),
        n => format!("{n} bytes"),
    }
}

/// Size and load of a subject.
fn parts(subject: Subject) -> Option<(u64, u64)> {
    match subject {
        Subject::Response { bytes, clients } => Some((bytes, clients)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_sizes() {
        assert_eq!([10.0, 1e3, 1e5, 1e8].map(with_unit), ["10 bytes", "1 KB", "100 KB", "100 MB"]);
    }
}
