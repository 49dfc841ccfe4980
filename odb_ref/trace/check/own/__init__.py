"""What one rank does, judged part by part: what it reads, holds, offers, forms and hands out."""
